"""The offline API on the real default model: generate, chat, streaming, asyncio, n, stops, errors that hurt nobody else."""

import asyncio
import gc
import math
import pathlib
import weakref
from typing import Any

import pytest
import tiny_models
import torch

from trireme import LLM, SamplingParams
from trireme.errors import BadRequest, ModelNotFound
from trireme.types import FinishReason

# Greedy continuations by transformers in float32 on the dequantised weights.
PROMPT = [504, 3575, 282, 4649, 314]
GREEDY = [
    7042,
    30,
    198,
    198,
    504,
    2988,
    314,
    42,
    216,
    34,
    32,
    33,
    40,
    29,
    32,
    33,
    29,
    34,
    34,
    216,
    33,
    34,
    42,
    33,
    34,
    42,
    37,
    35,
    30,
    2,
]
QUESTION = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
EXACT = SamplingParams(temperature=0.0, max_tokens=40)

pytestmark = pytest.mark.xdist_group("smollm2")


@pytest.fixture(scope="module")
def llm(smollm2_path: pathlib.Path):
    # unquantized: the expected tokens are those of float32 arithmetic
    with LLM(str(smollm2_path), max_model_len=1024, quantize="none", dtype="float32") as llm:
        yield llm
        llm._loop.call(llm.scheduler.check)
        stats = llm.scheduler.stats()
        assert stats.running == stats.waiting == 0
        assert stats.pages_free + stats.pages_cached == stats.pages_total


def test_text_and_token_ids_give_the_reference_tokens(llm: LLM) -> None:
    text, ids = llm.generate(["The capital of France is", PROMPT], EXACT)
    assert text.prompt_token_ids == PROMPT and text.token_ids == ids.token_ids == GREEDY
    assert text.text.startswith(" Paris.") and text.completions[0].finish_reason is FinishReason.STOP


def test_chat_by_the_models_template(llm: LLM) -> None:
    (output,) = llm.chat(QUESTION, EXACT)
    assert output.token_ids == [504, 3575, 282, 4649, 314, 7042, 30, 2]
    assert output.text == "The capital of France is Paris."


def test_prompts_and_conversations_in_other_forms(llm: LLM) -> None:
    sampling = SamplingParams(temperature=0.0, max_tokens=2)
    answers = llm.generate([{"prompt_token_ids": PROMPT}, {"prompt": "The capital of France is"}, PROMPT], sampling)
    assert [answer.completions[0].token_ids for answer in answers] == [GREEDY[:2]] * 3
    assert llm.generate({"prompt_token_ids": PROMPT}, sampling)[0].completions[0].token_ids == GREEDY[:2]
    assert llm.chat_tokens("Hello!") == llm.chat_tokens([{"role": "user", "content": "Hello!"}])
    assert llm.chat("Hello!", sampling)[0].text == llm.chat([{"role": "user", "content": "Hello!"}], sampling)[0].text
    with pytest.raises(BadRequest, match="prompt_token_ids"):
        llm.generate({"text": "x"})
    with pytest.raises(BadRequest, match="list of messages"):
        llm.chat([["hi"]])


def test_stream_adds_up(llm: LLM) -> None:
    pieces = list(llm.stream(PROMPT, EXACT))
    assert [t for p in pieces for t in p.token_ids] == GREEDY
    assert "".join(p.text for p in pieces) == llm.generate(PROMPT, EXACT)[0].text
    assert [p.finish_reason for p in pieces[:-1]] == [None] * (len(pieces) - 1)


def test_leaving_a_stream_frees_its_request(llm: LLM) -> None:
    stream = llm.stream(PROMPT, SamplingParams(max_tokens=900, ignore_eos=True))
    next(stream)
    stream.close()
    llm.generate(PROMPT, SamplingParams(max_tokens=2))
    assert llm.scheduler.stats().running == 0


def test_asyncio_streams_run_together(llm: LLM) -> None:
    async def run() -> list[list[int]]:
        async def one(count: int) -> list[int]:
            return [t async for p in llm.astream(PROMPT, SamplingParams(temperature=0.0, max_tokens=count)) for t in p.token_ids]

        outputs = await asyncio.gather(*(one(n) for n in (3, 5, 8)))
        whole = await llm.agenerate(PROMPT, EXACT)
        return [*outputs, whole.token_ids]

    assert asyncio.run(run()) == [GREEDY[:3], GREEDY[:5], GREEDY[:8], GREEDY]


def test_stop_strings_across_tokens(llm: LLM) -> None:
    whole = llm.generate(PROMPT, EXACT)[0].text
    (cut,) = llm.generate(PROMPT, SamplingParams(temperature=0.0, max_tokens=40, stop=["answer is"]))
    assert cut.text == whole[: whole.index("answer is")] and cut.completions[0].finish_reason is FinishReason.STOP
    (kept,) = llm.generate(PROMPT, SamplingParams(temperature=0.0, max_tokens=40, stop=["answer is"], include_stop=True))
    assert kept.text == whole[: whole.index("answer is") + len("answer is")]


def test_seeded_tokens_do_not_depend_on_the_batch(llm: LLM) -> None:
    sampling = SamplingParams(seed=11, max_tokens=12, temperature=0.9)
    alone = llm.generate(PROMPT, sampling)[0].token_ids
    others = [SamplingParams(seed=i, max_tokens=12) for i in range(6)]
    together = llm.generate([PROMPT] * 7, [*others[:3], sampling, *others[3:]])
    assert together[3].token_ids == alone
    assert len({tuple(o.token_ids) for o in together}) > 3


def test_n_and_best_of(llm: LLM) -> None:
    (output,) = llm.generate(PROMPT, SamplingParams(n=3, seed=5, max_tokens=6))
    assert [c.index for c in output.completions] == [0, 1, 2]
    assert len({tuple(c.token_ids) for c in output.completions}) > 1
    again = llm.generate(PROMPT, SamplingParams(n=3, seed=5, max_tokens=6))[0]
    assert [c.token_ids for c in again.completions] == [c.token_ids for c in output.completions]
    (best,) = llm.generate(PROMPT, SamplingParams(n=1, best_of=4, seed=5, max_tokens=6))
    every = llm.generate(PROMPT, SamplingParams(n=4, seed=5, max_tokens=6, logprobs=0))[0]
    likeliest = max(every.completions, key=lambda c: (c.cumulative_logprob or 0.0) / len(c.token_ids))
    assert best.token_ids == likeliest.token_ids and best.completions[0].logprobs is None


def test_logprobs_and_prompt_logprobs(llm: LLM) -> None:
    (output,) = llm.generate(PROMPT, SamplingParams(temperature=0.0, max_tokens=3, logprobs=2, prompt_logprobs=1))
    scores = output.completions[0].logprobs
    assert scores is not None and [s.token for s in scores] == GREEDY[:3]
    assert all(s.rank == 1 and s.top[0] == (s.token, s.logprob) and len(s.top) == 2 for s in scores)
    prompt = output.prompt_logprobs
    assert prompt is not None and prompt[0] is None and [p.token for p in prompt[1:] if p] == PROMPT[1:]
    assert all(p is None or (p.logprob < 0 and math.isfinite(p.logprob)) for p in prompt)
    # the same numbers when the answer is scored as a prompt
    (scored,) = llm.generate(PROMPT + GREEDY[:3], SamplingParams(max_tokens=0, prompt_logprobs=0))
    assert scored.token_ids == [] and scored.prompt_logprobs is not None
    for ours, theirs in zip(scored.prompt_logprobs[-3:], scores, strict=True):
        assert ours is not None and ours.logprob == pytest.approx(theirs.logprob, abs=1e-3)


def test_refusals_leave_the_engine_running(llm: LLM) -> None:
    for prompt, sampling in (
        (list(range(2000)), EXACT),
        ([10**6], EXACT),
        (PROMPT, SamplingParams(temperature=math.nan)),
        ([], EXACT),
    ):
        with pytest.raises(BadRequest):
            llm.generate([prompt], sampling)
    assert llm.generate(PROMPT, EXACT)[0].token_ids == GREEDY


def test_one_refused_prompt_ends_the_call_and_nothing_stays_behind(llm: LLM) -> None:
    with pytest.raises(BadRequest):
        llm.generate([PROMPT, list(range(2000))], SamplingParams(max_tokens=500, ignore_eos=True))
    llm.generate(PROMPT, SamplingParams(max_tokens=2))
    assert llm.scheduler.stats().running == 0


def test_prefix_is_reused(llm: LLM) -> None:
    prompt = list(range(100, 200))
    first = llm.generate(prompt, SamplingParams(temperature=0.0, max_tokens=4))[0]
    second = llm.generate(prompt, SamplingParams(temperature=0.0, max_tokens=4))[0]
    assert second.cached_tokens >= 80 and second.token_ids == first.token_ids


def test_capture_gives_a_layers_values(llm: LLM) -> None:
    with llm.capture("model.layers.3.self_attn", "model.norm") as values:
        llm.generate(list(range(300, 310)), SamplingParams(temperature=0.0, max_tokens=2))
    attention = values["model.layers.3.self_attn"]
    assert [tuple(v.shape) for v in attention] == [(10, 576), (1, 576)]
    assert all(torch.isfinite(v).all() for v in attention)
    llm.generate(PROMPT, SamplingParams(max_tokens=1))
    assert len(attention) == 2, "nothing is kept once the block is left"
    with pytest.raises(BadRequest, match="No layer"), llm.capture("model.layers.99"):
        pass


def test_unknown_model_says_what_to_do() -> None:
    with pytest.raises(ModelNotFound) as caught:
        LLM("no-such-model")
    assert "smollm2" in str(caught.value)


def test_what_was_loaded_is_not_searched_for_garbage() -> None:
    """A full collection in the midst of an answer would take 0.1 s; afterwards everything can be collected again."""
    with LLM("smollm2", max_model_len=64, kv_tokens=64) as engine:
        assert gc.get_freeze_count() > 10_000
        held = weakref.ref(engine.worker)
    assert gc.get_freeze_count() == 0
    del engine
    gc.collect()
    assert held() is None


def test_more_prompts_than_the_queue_holds(smollm2_path: pathlib.Path) -> None:
    """They go in as others end; those that go in together begin in the same step, whatever thread runs first."""
    prompts = [[504, 3575, 282, 4649 + i] for i in range(11)]
    sampling = [SamplingParams(temperature=0.0, max_tokens=3, n=2 if i == 4 else 1) for i in range(11)]
    plain: dict[str, Any] = {"quantize": "none", "dtype": "float32"}
    with LLM(str(smollm2_path), max_model_len=64, kv_tokens=1024, max_waiting=8, prefix_cache=False, **plain) as engine:
        plans: list[int] = []
        schedule = engine.scheduler.schedule

        def noted() -> Any:
            plan = schedule()
            plans.append(len(plan.rows) if plan else 0)
            return plan

        engine.scheduler.schedule = noted  # type: ignore[method-assign]
        outputs = engine.generate(prompts, sampling)
        assert plans[0] == 4, "half of the queue, all at once"
        assert [len(output.completions) for output in outputs] == [2 if i == 4 else 1 for i in range(11)]
        assert engine.generate([], sampling[:0]) == []
        alone = [engine.generate(prompt, sampling[0])[0].token_ids for prompt in prompts]
        assert [output.token_ids for output in outputs] == alone


def test_a_model_without_a_tokenizer_takes_token_ids(tmp_path: pathlib.Path) -> None:
    with LLM(str(tiny_models.save("llama2", tmp_path)), backend="reference", max_model_len=64) as llm:
        ids = tiny_models.prompt(6)
        output = llm.generate(ids, SamplingParams(temperature=0.0, max_tokens=5))[0]
        assert output.token_ids == tiny_models.reference("llama2", ids, 5)[0] and output.text == ""
        messages = [{"role": "user", "content": "hello"}]
        for asked in (lambda: llm.generate("hello"), lambda: next(llm.stream("hello")), lambda: llm.chat(messages)):
            with pytest.raises(BadRequest, match="no tokenizer"):
                asked()
        for more in ({"stop": ["."]}, {"grammar": 'start: "a"'}):
            with pytest.raises(BadRequest, match="no tokenizer"):
                llm.generate(ids, SamplingParams(**more))
