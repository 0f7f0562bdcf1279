"""End-to-end measurements on the CPU: equal text, states that are filled, memory that runs out."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys

import pytest
import torch

from kitty.benchmark import e2e, measure
from kitty.benchmark import implementations as ways
from kitty.benchmark.latency import ALLOCATOR, IMPLEMENTATIONS, LatencyJob, Workload
from kitty.benchmark.shapes import find_shape, random_model
from kitty.cache.packed import TORCH_GROUPS_HEADS
from kitty.errors import KittyError
from kitty.ops import dispatch
from kitty.records import fault_of, read_record

GQA = pytest.param(
    "hf-dynamic-gqa",
    marks=pytest.mark.skipif(not TORCH_GROUPS_HEADS, reason="needs torch 2.5 or later"),
)
DENSE = ["hf-dynamic", GQA, "hf-static", "hf-static-graph", "kitty-fp16"]
QUANTIZED = [
    pytest.param(
        name,
        marks=pytest.mark.skipif(
            importlib.util.find_spec(module) is None, reason=f"needs {module}"
        ),
    )
    for name, module in (("hf-hqq-int4", "hqq"), ("hf-quanto-int4", "optimum"))
]
LAYERS, HEADS, DIM, ITEM = 2, 2, 32, 4  # of qwen3-tiny in fp32


def job(implementation: str, **changes: object) -> LatencyJob:
    workload = changes.pop("workload", Workload(20, 30, 2))
    return LatencyJob(
        "qwen3-tiny", "qwen3-tiny", implementation, workload, dummy_weights=True, **changes
    )


@pytest.fixture(autouse=True)
def no_build(monkeypatch):
    """No extension of quanto is compiled for minutes; its arithmetic in torch is the same."""
    if importlib.util.find_spec("optimum") is not None:
        from optimum.quanto.tensor.packed import PackedTensor

        monkeypatch.setattr(PackedTensor, "unpack", ways._unpack_in_torch)
        monkeypatch.setattr(ways, "prepare_quanto", lambda device: "not built for tests")


def runner(implementation: str, workload: Workload) -> ways.Runner:
    asked = job(implementation, workload=workload)
    attention = ways.runner_class(asked).attention
    if attention == ways.GQA_ATTENTION:
        ways.register_gqa()
    model = random_model(find_shape("qwen3-tiny"), torch.float32, "cpu", attention)
    return ways.runner_class(asked)(model, asked, workload.batch, workload.total + 14)


@pytest.mark.parametrize("implementation", DENSE)
@torch.no_grad()
def test_a_16_bit_implementation_writes_the_text_of_generate(implementation: str) -> None:
    workload = Workload(20, 12, 2)
    model = random_model(find_shape("qwen3-tiny"), torch.float32, "cpu", "sdpa")
    ids = measure.prompts(model.config, workload, model.device)
    expected = model.generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=None)[:, 20:]
    way = runner(implementation, workload)
    tokens = [measure.greedy(way.prefill(ids))]
    for _ in range(11):
        tokens.append(measure.greedy(way.step(tokens[-1])))
    assert torch.equal(torch.cat(tokens, dim=1), expected)
    assert way.length == 31


@torch.no_grad()
def test_a_static_cache_attends_the_same_where_transformers_needs_a_mask(monkeypatch) -> None:
    logits = []
    for needed in (ways.WRITES_TO_ITS_MASK, True):
        monkeypatch.setattr(ways, "WRITES_TO_ITS_MASK", needed)
        way = runner("hf-static", Workload(20, 12, 2))
        ids = measure.prompts(way.config, way.job.workload, torch.device("cpu"))
        steps = [way.prefill(ids), *(way.step(ids[:, t : t + 1]) for t in range(11))]
        logits.append(torch.stack(steps))
    torch.testing.assert_close(*logits)


@pytest.mark.parametrize("implementation", ["hf-dynamic", GQA])
@torch.no_grad()
def test_a_filled_dynamic_cache_holds_so_many_tokens(implementation: str) -> None:
    way = runner(implementation, Workload(20, 100, 3))
    way.fill(77)
    assert way.cache.get_seq_length() == way.length == 77
    expected = LAYERS * 3 * HEADS * 77 * DIM * ITEM
    assert way.cache_bytes() == {"keys": expected, "values": expected}
    way.step(torch.zeros(3, 1, dtype=torch.int64))
    assert way.cache.get_seq_length() == 78


@torch.no_grad()
def test_a_filled_static_cache_attends_to_so_many_tokens() -> None:
    way = runner("hf-static-graph", Workload(20, 100, 1))
    way.fill(50)
    before = way.step(torch.tensor([[5]]))
    way.fill(50)
    for tensor in way.cache.key_cache:
        assert tensor[:, :, :50].abs().min() > 0
        assert not tensor[:, :, 51:].any()  # the step's own token stands at 50
    again = way.step(torch.tensor([[5]]))
    assert not torch.equal(before, again)  # other random tokens


@pytest.mark.parametrize("implementation", QUANTIZED)
@torch.no_grad()
def test_a_filled_quantized_cache_is_in_the_state_that_decoding_reaches(
    implementation: str,
) -> None:
    workload = Workload(20, 300, 2)
    decoded, filled = runner(implementation, workload), runner(implementation, workload)
    ids = measure.prompts(decoded.model.config, workload, torch.device("cpu"))
    decoded.prefill(ids)
    wrote = []
    for _ in range(140):
        held = decoded.cache._quantized_key_cache[0]
        length = decoded.length
        decoded.step(ids[:, :1])
        if decoded.cache._quantized_key_cache[0] is not held:
            wrote.append(length)
    assert wrote == [n for n in range(20, 160) if decoded.writes_pages(n)] == [147]
    filled.fill(decoded.length)
    assert filled.cache_bytes() == decoded.cache_bytes()
    for one, other in zip(filled.cache.key_cache, decoded.cache.key_cache, strict=True):
        assert one.shape == other.shape == (2, HEADS, 12, DIM)
    assert filled.step(ids[:, :1]).isfinite().all()


@torch.no_grad()
def test_kittys_page_steps_are_those_in_which_pages_are_written() -> None:
    way = runner("kitty-pro", Workload(100, 260, 1))
    ids = measure.prompts(way.model.config, way.job.workload, torch.device("cpu"))
    way.prefill(ids)
    storage = way.cache.state.pool.keys.storage
    wrote = []
    for length in range(100, 330):
        before = storage(0).words.clone()
        way.step(ids[:, :1])
        if not torch.equal(before, storage(0).words):
            wrote.append(length)
    assert wrote == [n for n in range(100, 330) if way.writes_pages(n)] == [160, 288]


@pytest.mark.skipif(importlib.util.find_spec("optimum") is None, reason="needs optimum-quanto")
def test_quantos_bytes_are_unpacked_in_torch_as_they_were_packed() -> None:
    from optimum.quanto.tensor.packed import PackedTensor

    for bits in (2, 4):
        codes = torch.randint(2**bits, (10, 7), dtype=torch.uint8)
        assert torch.equal(ways._unpack_in_torch(PackedTensor.pack(codes, bits)), codes)


def test_bytes_are_counted_once_in_nested_tensors() -> None:
    whole = torch.zeros(4, 8, dtype=torch.float16)
    nested = [whole, {"part": whole[1:], "more": (torch.zeros(3, dtype=torch.uint8), None)}]
    assert ways.held_bytes(nested) == 64 + 3


# --- measurements --------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["full", "sampled"])
@pytest.mark.parametrize("implementation", ["hf-dynamic", "hf-static", "kitty-pro", "kitty-fp16"])
def test_a_measurement_gives_a_sound_record(implementation: str, mode: str) -> None:
    record = measure.measure(job(implementation, mode=mode, points=2, steps=4, sub_batch=1))
    assert fault_of(record) is None
    assert record["outcome"] == "ok"
    metrics = record["metrics"]
    assert metrics["tokens_per_s"] == pytest.approx(
        2 * 30 / (metrics["prefill_s"] + metrics["decode_s"]), rel=1e-3
    )
    assert metrics["peak_allocated_bytes"] is None  # a CPU
    assert record["cache_bytes_16bit"] == 2 * LAYERS * HEADS * DIM * 2 * 50 * 2
    assert sum(record["cache_bytes"].values()) > 0
    timed = sum(len(s["step_ms"]) + len(s["page_step_ms"]) for s in record["samples"])
    assert timed == (29 if mode == "full" else 8)
    assert ("method" in record) == (implementation in ("kitty-pro", "kitty-fp16"))
    if implementation == "kitty-pro":
        assert record["counters"]["prefill_parts"] == 2
        assert record["counters"]["eager_steps"] >= (29 if mode == "full" else 14)
        assert record["counters"]["dense_fallbacks"] == 0
        assert "graphs need a GPU" in record["fallback_reason"]
        assert not record["unexpected_fallback"]


def test_what_warms_up_has_a_cache_of_the_timed_length(monkeypatch) -> None:
    lengths = []

    class Noting(ways.HfDynamic):
        def __init__(self, model, job, batch, max_length):
            lengths.append((batch, max_length))
            super().__init__(model, job, batch, max_length)

    monkeypatch.setitem(ways.RUNNERS, "hf-dynamic", Noting)
    measure.measure(job("hf-dynamic", workload=Workload(20, 6, 3)))
    # 20 + 6 tokens and two counted steps, in whole multiples of 16; two sequences warm up
    assert lengths == [(2, 32), (3, 32)]


@pytest.mark.parametrize("stage", ["cache", "prefill", "decode"])
def test_running_out_of_memory_is_a_result_that_says_where(stage: str, monkeypatch) -> None:
    class Full(ways.HfDynamic):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            self.fail("cache")

        def fail(self, where):
            if where == stage and self.batch == 7:  # not the two of the warm-up
                raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")

        def prefill(self, ids):
            self.fail("prefill")
            return super().prefill(ids)

        def step(self, tokens):
            self.fail("decode")
            return super().step(tokens)

    monkeypatch.setitem(ways.RUNNERS, "hf-dynamic", Full)
    record = measure.measure(job("hf-dynamic", workload=Workload(20, 6, 7)))
    assert fault_of(record) is None
    assert (record["outcome"], record["stage"]) == ("out_of_memory", stage)
    assert record["metrics"] == {}


def test_memory_that_ran_out_is_recognised_behind_other_exceptions() -> None:
    def raised(error: BaseException, cause: BaseException | None = None) -> BaseException:
        try:
            raise error from cause
        except type(error) as caught:
            return caught

    assert measure.ran_out(torch.cuda.OutOfMemoryError("CUDA out of memory"))
    assert measure.ran_out(raised(KittyError("exhausted"), torch.cuda.OutOfMemoryError("x")))
    assert measure.ran_out(RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate"))
    assert measure.ran_out(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"))
    assert not measure.ran_out(RuntimeError("CUDA error: an illegal memory access"))
    assert not measure.ran_out(raised(KittyError("pages"), ValueError("out of memory, it says")))


def test_a_reference_or_a_step_outside_a_graph_is_unexpected_on_a_gpu(monkeypatch) -> None:
    way = runner("kitty-pro", Workload(20, 30, 1))
    dispatch.calls.clear()
    assert way.unexpected is None
    monkeypatch.setattr(way, "job", job("kitty-pro", device="cuda"))
    assert way.unexpected is None
    way.engine.fallback_reason = "the model's step cannot be captured (x)"
    assert "outside a CUDA graph" in way.unexpected
    monkeypatch.setattr(way, "job", job("kitty-pro", device="cuda", graph=False))
    assert way.unexpected is None
    dispatch.calls["reference"] += 3
    assert way.unexpected.startswith("3 calls ran the torch reference")
    dispatch.calls.clear()


# --- processes -----------------------------------------------------------------------------------

HUGE = Workload(20, 10**12, 1)  # a static cache beyond any address space


@pytest.mark.parametrize("given", [None, "max_split_size_mb:512"])
def test_memory_of_a_gpu_is_taken_in_segments_that_grow_unless_told(
    given: str | None, monkeypatch, tmp_path
) -> None:
    for name in ALLOCATOR:
        monkeypatch.delenv(name, raising=False)
    if given is not None:
        monkeypatch.setenv(ALLOCATOR[1], given)
    e2e.run_job(job("kitty-pro", device="cuda:77"), tmp_path)
    set_for_all = os.environ.pop(ALLOCATOR[0], None)  # not for the tests that follow
    assert set_for_all == ("expandable_segments:True" if given is None else None)


def test_out_of_memory_and_crashes_leave_the_other_configurations_going(tmp_path) -> None:
    told: list[str] = []
    jobs = [
        job("hf-static", workload=HUGE),
        job("hf-static", workload=Workload(20, 10**12, 2)),
        job("hf-dynamic", memory_budget_bytes=1000),
        job("hf-dynamic"),
    ]
    outcomes = e2e.run_all(jobs, tmp_path, told.append)
    assert [o.job for o in outcomes] == [jobs[0], jobs[2], jobs[3]]  # the larger batch is left out
    full, refused, done = outcomes
    assert read_record(jobs[0].path(tmp_path))["outcome"] == "out_of_memory"
    assert (full.record["stage"], full.fits) == ("cache", False)
    assert refused.mistake
    assert "the weights of 'qwen3-tiny' alone take" in refused.fault
    assert done.fits
    assert e2e.exit_code(outcomes) == 1
    assert e2e.exit_code([full, done]) == 0
    assert "ran out of memory" in told[1]
    # what is there is not measured again
    before = jobs[3].path(tmp_path).stat().st_mtime_ns
    assert e2e.run_job(jobs[3], tmp_path).record == done.record
    assert jobs[3].path(tmp_path).stat().st_mtime_ns == before
    with pytest.raises(KittyError, match="another mode"):
        e2e.run_job(job("hf-dynamic", mode="sampled", steps=4), tmp_path)


def killed(asked: LatencyJob, path, send) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_process_that_is_killed_is_told_and_leaves_no_record(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(e2e, "_work", killed)
    outcome = e2e.run_job(job("hf-dynamic"), tmp_path)
    assert outcome.record is None
    assert "SIGKILL" in outcome.fault
    assert not list(tmp_path.rglob("*.json"))


def record_of(asked: LatencyJob, fits: bool, **changes: object) -> dict:
    return {"outcome": "ok" if fits else "out_of_memory", "stage": "cache", **changes}


@pytest.mark.parametrize(
    ("limit", "expected"), [(280, 280), (50, 48), (7, None), (1000, 288), (8, 8)]
)
def test_the_largest_batch_is_found_by_few_tries(tmp_path, monkeypatch, limit, expected) -> None:
    sizes = [8, 16, 32, 48, 64, 96, 128, 192, 256, 272, 280, 288]
    tried: list[int] = []

    def pretend(asked: LatencyJob, root) -> e2e.Outcome:
        tried.append(asked.workload.batch)
        return e2e.Outcome(asked, record_of(asked, asked.workload.batch <= limit))

    monkeypatch.setattr(e2e, "run_job", pretend)
    monkeypatch.setattr(e2e, "line", lambda outcome: "")
    found, outcomes = e2e.largest_batch(job("kitty-pro"), sizes, tmp_path, lambda text: None)
    assert found == expected
    assert len(tried) == len(outcomes) <= 4


def test_an_unexpected_fall_back_is_a_failure() -> None:
    asked = job("kitty-pro")
    slow = {"fallback_reason": "steps ran outside a CUDA graph: x"}
    expected = e2e.Outcome(asked, record_of(asked, True, **slow, unexpected_fallback=False))
    unexpected = e2e.Outcome(asked, record_of(asked, True, **slow, unexpected_fallback=True))
    assert e2e.exit_code([expected]) == 0
    assert e2e.exit_code([expected, unexpected]) == 1


def test_every_implementation_has_a_runner() -> None:
    for name in IMPLEMENTATIONS:
        assert issubclass(ways.runner_class(job(name)), ways.Runner)


def test_the_command_finds_the_largest_batch_and_goes_on_from_its_records(tmp_path) -> None:
    command = [sys.executable, "-m", "kitty", "bench", "e2e", "--model-config", "qwen3-tiny"]
    command += ["--dummy-weights", "--prompt", "8", "--new", "4", "-i", "hf-dynamic"]
    command += ["--batch", "1,2", "--memory-budget", "1GB", "--out", str(tmp_path)]
    options = {"capture_output": True, "text": True, "timeout": 600}
    done = subprocess.run([*command, "--largest"], **options)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "hf-dynamic: largest batch that fits: 2\n"
    assert "recorded but not enforced on cpu" in done.stderr
    paths = sorted(tmp_path.rglob("*.json"))
    assert [path.name for path in paths] == ["p8-n4-b1.json", "p8-n4-b2.json"]
    assert read_record(paths[0])["memory_budget_bytes"] == 10**9
    assert read_record(paths[0])["budget_enforced"] is False
    before = [path.stat().st_mtime_ns for path in paths]
    again = subprocess.run([*command, "--json"], **options)
    assert again.returncode == 0, again.stderr
    assert [record["workload"]["batch"] for record in json.loads(again.stdout)] == [1, 2]
    assert [path.stat().st_mtime_ns for path in paths] == before
