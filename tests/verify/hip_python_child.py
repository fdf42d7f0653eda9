"""What the package does with the hip-python on this interpreter's path, as JSON: two releases fit no process."""

import importlib
import json
import sys

from vllm_aiter_mla.commands import doctor
from vllm_aiter_mla.verify import hip_python, launches


def main(loader: str = "") -> None:
    """Print what each side says; ``old-name`` plants the import that releases up to 7 allow."""
    if loader == "old-name":
        hip_python._load = lambda: importlib.import_module("hip.hip")
    found = hip_python.find()
    said = {"version": hip_python.version(), "problem": found if isinstance(found, str) else None}
    said["calls"] = [name for name in hip_python.CALLS if callable(getattr(found, name, None))]
    try:
        said["launches"] = launches.of_dot(launches.hip_dot(0x1234))
    except launches.DumpError as error:
        said["error"] = str(error)
    for rocm in ("7.2.2", "10.0.0"):
        doctor.rocm_version = lambda rocm=rocm: rocm
        check = doctor.hip_python({})
        said[rocm] = [check.status, check.detail, check.remedy]
    print(json.dumps(said))


main(*sys.argv[1:])
