"""Which process of pytest-xdist runs which tests, where one of them may end by itself."""

from __future__ import annotations

from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

__all__ = ["WholeFiles"]


class WholeFiles(LoadFileScheduling):
    """Whole files of tests; what is left of a file whose process has ended goes to another process.

    pytest-xdist itself would begin with the test that has ended the process, up to twelve times, and each of them may
    hang for minutes. It would also give away files without a test left, with which a new process waits for ever.
    """

    def remove_node(self, node: WorkerController) -> str | None:
        """Take the tests of a process that has ended; the name of the one that has ended it, None if all were done."""
        files = self.assigned_work.pop(node)
        left = {file: [test for test, done in tests.items() if not done] for file, tests in files.items()}
        unfinished = [test for tests in left.values() for test in tests]
        for file, tests in left.items():
            if remaining := dict.fromkeys([test for test in tests if test != unfinished[0]], False):
                self.workqueue[file] = remaining
        for other in self.assigned_work if unfinished else ():
            self._reschedule(other)
        if unfinished and hasattr(node, "workeroutput"):  # its session has ended too early, of which nobody knows why
            self.config.pluginmanager.get_plugin("dsession").handle_crashitem(unfinished[0], node)
            return None  # because pytest-xdist would end all processes otherwise
        return unfinished[0] if unfinished else None

    def _reschedule(self, node: WorkerController) -> None:
        """Give a process files until it has three tests, or all are given away.

        A process runs a test only when it knows the one after it, or that there is none. pytest-xdist itself gives a
        new process one file, so where that has a single test, the process waits for ever.
        """
        while self.workqueue and not node.shutting_down and self._pending_of(self.assigned_work[node]) <= 2:
            self._assign_work_unit(node)
        if not self.workqueue and not node.shutting_down:
            node.shutdown()
