"""Ranks as processes: the same tokens as in one process, and an end within seconds when one dies or hangs."""

import os
import pathlib
import signal
import time

import pytest

from trireme import LLM, SamplingParams
from trireme.errors import TriremeError, WorkerDied

PROMPT = [504, 3575, 282, 4649, 314]
GREEDY = [7042, 30, 198, 198, 504, 2988, 314, 42]
pytestmark = pytest.mark.xdist_group("smollm2")


def open_llm(path: pathlib.Path, tp: int) -> LLM:
    return LLM(str(path), tp=tp, max_model_len=512, quantize="none", dtype="float32", threads=1)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.wide
@pytest.mark.parametrize("tp", [2, 3])
def test_ranks_give_the_tokens_of_one_process(smollm2_path: pathlib.Path, tp: int) -> None:
    with open_llm(smollm2_path, tp) as llm:
        outputs = llm.generate([PROMPT, list(range(50, 90)), PROMPT], SamplingParams(temperature=0.0, max_tokens=8))
        assert outputs[0].token_ids == outputs[2].token_ids == GREEDY
        ranks = llm.worker.ranks
        pids = [rank.process.pid for rank in ranks]
    assert not any(alive(pid) for pid in pids), "ranks outlived their group"


@pytest.mark.wide
@pytest.mark.parametrize(("sign", "word"), [(signal.SIGKILL, "SIGKILL"), (signal.SIGSTOP, "no sign of life")])
def test_a_dead_or_hung_rank_ends_the_group_with_one_line(smollm2_path: pathlib.Path, sign: signal.Signals, word: str) -> None:
    llm = open_llm(smollm2_path, 2)
    try:
        stream = llm.stream(PROMPT, SamplingParams(max_tokens=400, ignore_eos=True))
        next(stream)
        ranks = llm.worker.ranks
        pids = [rank.process.pid for rank in ranks]
        os.kill(pids[1], sign)
        begun = time.monotonic()
        with pytest.raises(WorkerDied) as caught:
            for _ in stream:
                pass
        assert time.monotonic() - begun < 60  # seconds, not minutes: the machine may be loaded
        assert "rank 1 of 2" in str(caught.value) and word in str(caught.value) and "\n" not in str(caught.value)
        assert not any(alive(pid) for pid in pids)
        with pytest.raises(TriremeError):
            llm.generate(PROMPT)
    finally:
        llm.close()


def test_a_rank_that_cannot_load_says_why(tmp_path: pathlib.Path, smollm2_path: pathlib.Path) -> None:
    with pytest.raises(TriremeError) as caught:
        LLM(str(smollm2_path), tp=2, kv_tokens=10**9)
    assert "KV for 1000000000 tokens" in str(caught.value) and caught.value.exit_code == 9
