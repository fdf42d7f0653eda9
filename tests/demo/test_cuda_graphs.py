"""The emulation of CUDA graphs: what a replay shows to Python, what it must not write, and what pads it."""

from types import SimpleNamespace

import pytest
import torch
from vllm import forward_context
from vllm.compilation import monitor
from vllm.compilation.backends import VllmBackend
from vllm.compilation.piecewise_backend import PiecewiseBackend
from vllm.config import CUDAGraphMode

from tests.sandbox import attention, cuda_graphs
from vllm_aiter_mla.kernels.device import card

NAME, ROWS, BLOCKS, SIZE, WIDTH = "layer", 4, 6, 2, 3


class Runner:
    """vLLM's persistent buffers around a model of one layer, and its steps.

    Args:
        monkeypatch: puts this runner's forward context into vLLM.
        slots_of: the slots that the layer writes its first rows to, out of those of its step.
    """

    def __init__(self, monkeypatch, slots_of=lambda slots: slots[slots >= 0]):
        self.slots = torch.full((ROWS,), -1)
        self.values = torch.zeros(ROWS)
        self.table = torch.zeros(ROWS, 1, dtype=torch.int32)
        self.cache = torch.zeros(BLOCKS, SIZE, WIDTH)
        self.seen, self.slots_of = [], slots_of
        self.graphs = cuda_graphs.FullGraphs(self.forward)
        monkeypatch.setattr(forward_context, "get_forward_context", lambda: self.context)
        monkeypatch.setattr(monitor, "cudagraph_capturing_enabled", True)
        monkeypatch.setattr(cuda_graphs, "REPLAYS", type(cuda_graphs.REPLAYS)())

    def forward(self, values):
        metadata, slots = self.context.attn_metadata[NAME], self.context.slot_mapping[NAME]
        self.seen.append((metadata.num_actual_tokens, card().is_capturing()))
        slots = self.slots_of(slots)
        self.cache.view(-1, WIDTH)[slots] = values[: slots.shape[0]].unsqueeze(1)
        return values * 2

    def step(self, slots, mode=CUDAGraphMode.FULL, actual_tokens=ROWS):
        """One step of ``len(slots)`` real rows, by metadata of its own; without slots what vLLM captures with."""
        n = len(slots)
        self.slots.fill_(-1)
        self.slots[:n] = torch.tensor(slots)
        self.values.copy_(torch.arange(ROWS) + 7.0)
        self.table.zero_()
        self.table[:n, 0] = torch.tensor(slots, dtype=torch.int32) // SIZE
        metadata = SimpleNamespace(num_actual_tokens=actual_tokens, decode=SimpleNamespace(block_table=self.table))
        self.context = SimpleNamespace(
            cudagraph_runtime_mode=mode, batch_descriptor=ROWS, attn_metadata={NAME: metadata},
            slot_mapping={NAME: self.slots}, no_compile_layers={NAME: SimpleNamespace(kv_cache=self.cache)},
        )  # fmt: skip
        return self.graphs(values=self.values)


@pytest.fixture
def runner(monkeypatch):
    return Runner(monkeypatch)


def test_a_replay_shows_the_numbers_of_the_capture_and_the_tensors_of_the_step(runner):
    runner.step([])
    runner.step([5, 2], actual_tokens=2)
    assert runner.seen == [(ROWS, True), (ROWS, True)]
    assert runner.cache.view(-1, WIDTH)[:, 0].tolist() == [0, 0, 8, 0, 0, 7, 0, 0, 0, 0, 0, 0]
    assert cuda_graphs.REPLAYS == {(2, ROWS): 1}
    assert not card().is_capturing()


def test_each_replay_hands_out_the_same_tensor(runner):
    first = runner.step([])
    assert runner.step([5]) is runner.step([2]) is first


@pytest.mark.parametrize("mode", [CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE])
def test_a_step_without_a_full_graph_runs_the_model_itself(runner, mode):
    runner.step([], mode=mode)
    runner.step([5], mode=mode)
    assert runner.seen == [(ROWS, False)] * 2
    assert not cuda_graphs.REPLAYS


def test_a_graph_is_captured_while_vllm_captures_and_at_no_other_time(runner, monkeypatch):
    monkeypatch.setattr(monitor, "cudagraph_capturing_enabled", False)
    with pytest.raises(RuntimeError, match="capturing"):
        runner.step([5])


@pytest.mark.mutation
@pytest.mark.parametrize(
    "bug",
    [
        # Padding ends in vLLM's null block, in the cache's last row, or in a block of the last request.
        pytest.param(lambda slots: slots.clamp(min=0), id="clamps"),
        pytest.param(lambda slots: slots, id="wraps"),
        pytest.param(lambda slots: torch.where(slots < 0, slots.max() ^ 1, slots), id="next row"),
    ],
)
def test_mutation_a_kv_row_for_padding_is_caught(monkeypatch, bug):
    runner = Runner(monkeypatch)
    runner.step([])
    runner.slots_of = bug
    with pytest.raises(RuntimeError, match="outside its slots"):
        runner.step([5, 2])


@pytest.mark.mutation
def test_mutation_slots_that_were_copied_at_the_capture_leave_the_rows_of_a_replay_unwritten(monkeypatch):
    copies = []
    runner = Runner(monkeypatch, lambda slots: copies.append(slots[slots >= 0]) or copies[0])
    runner.step([])
    runner.step([5, 2])
    assert not runner.cache.any()


class Piece:
    """A piece that doubles its input, in a step of vLLM's.

    Args:
        monkeypatch: puts this step's forward context into vLLM.
        body: what the piece computes of its input.
    """

    def __init__(self, monkeypatch, body=lambda values: (values * 2, values)):
        self.values, self.seen, self.body = torch.zeros(ROWS), [], body
        self.graphs = cuda_graphs.PieceGraphs(self.forward, None, CUDAGraphMode.PIECEWISE, None)
        monkeypatch.setattr(forward_context, "get_forward_context", lambda: self.context)
        monkeypatch.setattr(monitor, "cudagraph_capturing_enabled", True)
        for counter in ("CAPTURED", "REPLAYED"):
            monkeypatch.setattr(cuda_graphs, counter, type(cuda_graphs.REPLAYS)())

    def forward(self, values):
        self.seen.append((self.context.attn_metadata, card().is_capturing()))
        return self.body(values)

    def step(self, value, mode=CUDAGraphMode.PIECEWISE, values=None, metadata="step", slots=None):
        """One step; the first one captures: as V1, without metadata, or as V2, with those of a decode batch."""
        self.values.fill_(value)
        self.context = SimpleNamespace(
            cudagraph_runtime_mode=mode, batch_descriptor=forward_context.BatchDescriptor(ROWS),
            attn_metadata=metadata, slot_mapping=slots,
        )  # fmt: skip
        return self.graphs(self.values if values is None else values)


@pytest.fixture
def piece(monkeypatch):
    return Piece(monkeypatch)


@pytest.mark.parametrize("metadata", [None, "of a decode batch"], ids=["V1", "V2"])
def test_a_replayed_piece_sees_the_metadata_of_its_capture_and_fills_the_outputs_of_the_capture(piece, metadata):
    slots = {NAME: torch.arange(ROWS)}
    captured = piece.step(1.0, metadata=metadata, slots=slots)
    replayed = piece.step(3.0, slots=slots)
    assert [one.data_ptr() for one in replayed] == [one.data_ptr() for one in captured]
    assert [one.tolist() for one in replayed] == [[6.0] * ROWS, [3.0] * ROWS]
    assert piece.seen == [(metadata, True)] * 2
    assert (cuda_graphs.CAPTURED, cuda_graphs.REPLAYED) == ({ROWS: 1}, {ROWS: 1})
    assert (piece.context.attn_metadata, card().is_capturing()) == ("step", False)


@pytest.mark.parametrize("mode", [CUDAGraphMode.NONE, CUDAGraphMode.FULL])
def test_a_piece_runs_itself_in_a_step_of_another_mode(piece, mode):
    for value in (1.0, 3.0):
        assert piece.step(value, mode)[0].tolist() == [2 * value] * ROWS
    assert piece.seen == [("step", False)] * 2
    assert not cuda_graphs.CAPTURED


def test_vllm_finds_the_compiled_piece_inside_its_graphs_and_keeps_it_for_a_warm_start(monkeypatch):
    class Compiled(PiecewiseBackend):
        def __init__(self):
            self.sym_shape_indices, self.returns_tuple = [], True

        def to_bytes(self):
            return {"1-16": b"compiled"}

    monkeypatch.setenv("VLLM_USE_MEGA_AOT_ARTIFACT", "1")
    split = torch.nn.Sequential(torch.nn.Identity())
    vars(split)["0"] = cuda_graphs.PieceGraphs(Compiled(), None, CUDAGraphMode.PIECEWISE, None)
    kept, *_ = VllmBackend.collect_standalone_compile_artifacts(SimpleNamespace(split_gm=split))
    assert kept.get("0", "1-16") == b"compiled"


def test_a_piece_is_captured_while_vllm_captures_and_at_no_other_time(piece, monkeypatch):
    monkeypatch.setattr(monitor, "cudagraph_capturing_enabled", False)
    with pytest.raises(RuntimeError, match="capturing"):
        piece.step(1.0)


@pytest.mark.mutation
def test_mutation_an_input_that_moves_after_the_capture_is_caught(piece):
    piece.step(1.0)
    with pytest.raises(RuntimeError, match="has moved"):
        piece.step(3.0, values=torch.full((ROWS,), 3.0))


@pytest.mark.mutation
def test_mutation_slots_that_move_after_the_capture_are_caught(piece):
    piece.step(1.0, slots={NAME: torch.arange(ROWS)})
    with pytest.raises(RuntimeError, match="has moved"):
        piece.step(3.0, slots={NAME: torch.arange(ROWS)})


def test_pieces_forget_what_was_captured_over_a_cache_that_is_thrown_away(piece):
    piece.step(1.0)
    cuda_graphs.PieceGraphs.forget_all()
    assert not cuda_graphs.CAPTURED
    piece.step(3.0, values=torch.full((ROWS,), 3.0))
    assert (cuda_graphs.CAPTURED, cuda_graphs.REPLAYED) == ({ROWS: 1}, {})


@pytest.mark.mutation
def test_mutation_a_decision_by_the_metadata_inside_a_piece_is_frozen(monkeypatch):
    piece = Piece(monkeypatch, lambda values: (values * (piece.context.attn_metadata is not None),))
    assert not piece.step(1.0, metadata=None)[0].any()
    assert not piece.step(3.0)[0].any()
    assert piece.step(3.0, CUDAGraphMode.NONE)[0].all()


def test_an_inductor_piece_whose_call_empties_its_list_of_inputs_is_replayed(monkeypatch):
    piece = Piece(monkeypatch, lambda values: (values.pop() + 1,))
    for value in (1.0, 3.0):
        assert piece.step(value, values=[piece.values])[0].tolist() == [value + 1] * ROWS
    assert cuda_graphs.REPLAYED == {ROWS: 1}


@pytest.mark.parametrize("per_request", [1, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_attention_of_requests_that_pad_is_nan_and_changes_no_other_row(dtype, per_request):
    torch.manual_seed(0)
    implementation = object.__new__(attention.SandboxMLAImpl)
    implementation.kv_lora_rank, implementation.scale = 512, 0.1
    layer = SimpleNamespace(_q_scale=torch.ones(1), _k_scale=torch.ones(1), W_UV=torch.zeros(1, dtype=torch.bfloat16))
    q = torch.randn(4 * per_request, 2, 576).to(dtype)
    cache = torch.randn(3, 16, 576).to(dtype)

    def attend(requests):
        decode = SimpleNamespace(
            block_table=torch.tensor([[1], [2], [0], [0]], dtype=torch.int32)[:requests],
            seq_lens=torch.tensor([5, 9, 0, 0], dtype=torch.int32)[:requests],
        )
        rows = q[: requests * per_request]
        return implementation.forward_mqa(rows, cache, SimpleNamespace(decode=decode), layer)[0]

    padded, real = attend(4), attend(2)
    assert real.isfinite().all()
    assert torch.equal(padded[: 2 * per_request], real)
    assert padded[2 * per_request :].isnan().all()
