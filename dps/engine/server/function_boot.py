"""The program of a process in which a server runs functions of users: `function_process.py` starts it.

It is a script and not a module, because the package `dps` loads Dask, of which a function seldom needs anything. So the
package is made without its content here. That is loaded when something asks for a name of it.
"""

import importlib
import importlib.util
import json
import sys
import types


class LaterPackage(types.ModuleType):
    """A package whose `__init__.py` runs when a name is asked for that is none of its modules."""

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        if importlib.util.find_spec(f"{self.__name__}.{name}") is not None:  # in the middle of an import, perhaps
            return importlib.import_module(f"{self.__name__}.{name}")
        self.__class__ = types.ModuleType  # type: ignore[assignment]
        assert self.__spec__ is not None
        assert self.__spec__.loader is not None
        self.__spec__.loader.exec_module(self)
        return getattr(self, name)


def main() -> None:
    path, number, parent, memory = json.loads(sys.argv[1])
    sys.path[:] = path
    spec = importlib.util.find_spec("dps")
    assert spec is not None
    package = importlib.util.module_from_spec(spec)
    package.__class__ = LaterPackage
    sys.modules["dps"] = package
    importlib.import_module("dps.engine.server.function_child").serve(number, parent, memory)


if __name__ == "__main__":
    main()
