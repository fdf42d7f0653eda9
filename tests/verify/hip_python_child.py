"""What the package does with the hip-python on this interpreter's path, as JSON: two releases fit no process."""

import json

from vllm_aiter_mla.verify import hip_python, launches

found = hip_python.find()
said = {"version": hip_python.version(), "problem": found if isinstance(found, str) else None}
said["calls"] = [name for name in hip_python.CALLS if callable(getattr(found, name, None))]
try:
    said["launches"] = launches.of_dot(launches.hip_dot(0x1234))
except launches.DumpError as error:
    said["error"] = str(error)
print(json.dumps(said))
