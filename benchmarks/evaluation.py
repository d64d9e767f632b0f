"""A 2K-context recall task through `osdn eval`'s own path, with the cache and by recomputing the prefix.

    python benchmarks/evaluation.py
    python benchmarks/evaluation.py --batches     # how fast batches of several sizes are, instead

The model has the width, heads and vocabulary of `osdn-340m` with fewer layers and random weights; documents
are passages of Python's documentation in the format of FDA.  Both ways give 48 greedy tokens a document
through `lm_eval`, and must give the same text.  The result goes to runs/bench/evaluation.json.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from pydoc_data import topics
from typing import Any

import torch

from osdn import OSDNConfig, OSDNForCausalLM
from osdn.evaluation.harness import TokenBatchedLM, load_task
from osdn.results.store import save_json
from osdn.training.data import train_tokenizer

PRESET, LAYERS, CONTEXT = "osdn-340m", 4, 2000
GREEDY: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}


class Recomputing(TokenBatchedLM):
    """Reads the whole prefix again for every new token."""

    def _model_generate(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        generate = self.model.generate
        self.model.generate = lambda **options: generate(**{**options, "use_cache": False})
        try:
            return super()._model_generate(*args, **kwargs)
        finally:
            self.model.generate = generate


def write_documents(folder: Path, tokenizer: Any, text: str, count: int) -> None:
    """FDA's fields; each document ends in its cue."""
    ids = tokenizer(text).input_ids
    rows = []
    for i in range(count):
        passage = tokenizer.decode(ids[i * CONTEXT : (i + 1) * CONTEXT - 8])
        rows.append({"text": f"{passage}\ndevice name:", "key": "device name", "value": f"pump {i}"})
    path = folder / "hazyresearch/based-fda/validation.jsonl"
    path.parent.mkdir(parents=True)
    path.write_text("\n".join(map(json.dumps, rows)))


@torch.inference_mode()
def time_batches(model: OSDNForCausalLM) -> dict[str, dict[int, float]]:
    """Tokens a second: scored, by the tokens of a batch of 64-token requests; decoded, by its prompts."""
    scored, decoded = {}, {}
    for tokens in (64, 256, 1024, 4096, 8192):
        ids = torch.randint(3, 30_000, (tokens // 64, 64))
        start, count = time.perf_counter(), 0
        while count < 2 or time.perf_counter() - start < 3:
            model(ids).logits.log_softmax(-1)
            count += 1
        scored[tokens] = tokens * count / (time.perf_counter() - start)
        print(f"scoring, {tokens:5} tokens at once: {scored[tokens]:6.0f} tokens a second")
    for prompts in (1, 4, 16, 32):
        ids = torch.randint(3, 30_000, (prompts, 8))
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=2, **GREEDY)
        start = time.perf_counter()
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, **GREEDY)
        decoded[prompts] = 24 * prompts / (time.perf_counter() - start)
        print(f"decoding, {prompts:5} prompts at once: {decoded[prompts]:5.0f} tokens a second")
    return {"scored": scored, "decoded": decoded}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--documents", type=int, default=2)
    parser.add_argument("--batches", action="store_true")
    parser.add_argument("--output", type=Path, default=Path("runs/bench/evaluation.json"))
    options = parser.parse_args()
    torch.manual_seed(0)
    model = OSDNForCausalLM(OSDNConfig.from_preset(PRESET, num_hidden_layers=LAYERS)).eval()
    if options.batches:
        path = options.output.with_name("evaluation_batches.json")
        save_json(path, {"kind": "evaluation batches", "layers": LAYERS, **time_batches(model)})
        return
    text = " ".join(" ".join(topics.topics.values()).split())
    tokenizer = train_tokenizer([text], 4000)
    seconds, answers = {}, {}
    with tempfile.TemporaryDirectory() as folder:
        write_documents(Path(folder), tokenizer, text, options.documents)
        task = load_task("fda", tokenizer, data_dir=folder)
        for name, kind in (("cache", TokenBatchedLM), ("recomputing", Recomputing)):
            lm = kind(model, tokenizer=tokenizer, backend="causal", tokens_at_once=4096)
            task.build_all_requests(limit=None, rank=0, world_size=1)
            start = time.perf_counter()
            answers[name] = lm.generate_until(task.instances)
            seconds[name] = time.perf_counter() - start
    assert answers["cache"] == answers["recomputing"], "the cache changed an answer"
    ratio = seconds["recomputing"] / seconds["cache"]
    print(
        f"{options.documents} documents of {CONTEXT} tokens, 48 new tokens each, {LAYERS} layers of {PRESET}"
    )
    print(", ".join(f"{name} {time:.1f} s" for name, time in seconds.items()) + f": {ratio:.1f} × faster")
    setting = {"preset": PRESET, "layers": LAYERS, "context": CONTEXT, "documents": options.documents}
    save_json(options.output, {"kind": "evaluation speed", **setting, "seconds": seconds, "ratio": ratio})


if __name__ == "__main__":
    main()
