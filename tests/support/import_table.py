"""Which part of the package may import which; docs/development.md draws it, docs/generated/imports.md lists it."""

FIRST = {"settings", "admission", "files"}
"""Decide on plain values. Importing them imports neither torch nor vLLM."""
BASE = FIRST | {"kernels", "compat", "status"}

ARROWS: dict[str, set[str]] = {
    **{part: set() for part in sorted(FIRST)},
    "admission": {"settings"},
    "kernels": FIRST,
    "status": FIRST | {"compat"},
    "compat": FIRST,
    "serving": BASE,
    "passes": BASE | {"serving"},
    "startup": BASE | {"serving"},
    "engine": BASE | {"serving", "startup"},
    "gate": BASE | {"passes", "serving"},
    "plugin": {"compat", "engine", "gate"},
    "verify": FIRST | {"kernels", "serving", "startup"},
}
ARROWS["commands.compat"] = FIRST | {"kernels", "compat", "serving"}
ARROWS["commands"] = set(ARROWS)
ARROWS["__main__"] = {"commands"}
"""Each part may import those named; docs/development.md draws it. Nobody may import ``commands``."""
