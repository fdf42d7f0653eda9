"""Record DOT dumps of one captured step on this machine's GPU: ``python tests/verify/record_dot.py <folder>``."""

import sys
from pathlib import Path

import torch

from vllm_aiter_mla.verify import backends, devices
from vllm_aiter_mla.verify.buffers import Buffers
from vllm_aiter_mla.verify.layer import Batch
from vllm_aiter_mla.verify.session import native_fp8
from vllm_aiter_mla.verify.setting import REAL, variants
from vllm_aiter_mla.verify.subject import Subject, build


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    variant = variants("cuda", native_fp8(), quick=True)[0]
    for name in backends.FINDERS:
        found = backends.find(name)
        if not isinstance(found, Subject):
            print(f"{name}: {found}")
            continue
        buffers = Buffers(REAL, variant, 16, 1, 1, "cuda", 0)
        buffers.before_capture(Batch(16))
        (segment,) = build("kernel", buffers, found, 16)
        segment.run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.graph(graph):
            segment.run()
        kind = "hip" if torch.version.hip else "cuda"
        path = folder / f"{kind}_{name}.dot"
        path.write_text(devices.graph_dot(graph))
        print(path)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
