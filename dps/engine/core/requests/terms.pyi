from dps.engine.core.requests.form import Form

class Terms:
    form: Form
    kind: int
    flags: int
    epoch: int
    most: int
    keys: int
    pushes: bool
    answered: bool
    merges: bool
    carries: bool
    narrow: bool
    def __init__(
        self,
        form: Form,
        epoch: int,
        most: int,
        kind: int,
        flags: int,
        pushes: bool,
        answered: bool,
        merges: bool,
        keys: int = ...,
        narrow: bool = ...,
    ) -> None: ...
