"""lm-eval's own client for `local-completions` against the server: log-likelihoods, greediness, generation."""

import json
import os
import sys

from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI

url, key = sys.argv[1:]
os.environ["OPENAI_API_KEY"] = key
model = LocalCompletionsAPI(
    model="smollm2",
    base_url=f"{url}/v1/completions",
    tokenizer_backend=None,
    tokenized_requests=False,
    num_concurrent=1,
    max_length=2048,
)
pairs = [("The capital of France is", " Paris"), ("The capital of France is", " Berlin")]
scored = []
for context, ending in pairs:
    answer = model.model_call([f"{context}{ending}"], generate=False)
    scored.append(model.parse_logprobs(answer, tokens=[[0] * 6], ctxlens=[5])[0])
remote = LocalCompletionsAPI(
    model="smollm2",
    base_url=f"{url}/v1/completions",
    tokenizer_backend="remote",
    auth_token=key,
    num_concurrent=1,
    max_length=2048,
)
encoded = remote.tok_encode("The capital of France is")
assert len(encoded) == 5 and remote.tokenizer.decode(encoded) == "The capital of France is", encoded
assert remote.tokenizer.eos_token_id == 2 and remote.eot_token_id == 2
by_ids = Instance(request_type="loglikelihood", doc={}, arguments=pairs[0], idx=0)
assert abs(remote.loglikelihood([by_ids], disable_tqdm=True)[0][0] - scored[0][0]) < 1e-3
# Batches of 64 prompts in one request, beside one at a time.
sent: list[int] = []


class Batches(LocalCompletionsAPI):
    def model_call(self, messages, *, generate=True, **more):
        sent.append(len(messages))
        return super().model_call(messages, generate=generate, **more)


many = Batches(
    model="smollm2",
    base_url=f"{url}/v1/completions",
    tokenizer_backend="remote",
    auth_token=key,
    num_concurrent=1,
    max_length=2048,
    batch_size=64,
)
questions = [(f"{number} and {number} make", f" {2 * number}, as everybody knows") for number in range(10, 74)]
asked = [Instance(request_type="loglikelihood", doc={}, arguments=question, idx=i) for i, question in enumerate(questions)]
together = many.loglikelihood(asked, disable_tqdm=True)
assert sent == [64], sent
alone = remote.loglikelihood([asked[0], asked[31], asked[63]], disable_tqdm=True)
for (logprob, greedy), (expected, likeliest) in zip([together[0], together[31], together[63]], alone, strict=True):
    assert abs(logprob - expected) < 1e-3 and greedy == likeliest, (logprob, expected)
until = {"until": ["."], "max_gen_toks": 8, "temperature": 0}
request = Instance(request_type="generate_until", doc={}, arguments=("The capital of France is", until), idx=0)
text = model.generate_until([request], disable_tqdm=True)[0]
print(json.dumps({"scored": scored, "text": text}))
