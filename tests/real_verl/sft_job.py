"""What a user's SFT job on verl has on disk, and the loss that it should report.

    python sft_job.py FOLDER    # writes model/, train.parquet and reference.json

The reference is one process without verl: every document alone in eager attention, all of a step's documents in one
loss, AdamW and gradient clipping as verl's defaults have them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

STEPS, DOCUMENTS, BATCH, RANKS, LEARNING_RATE = 20, 16, 8, 2, 1e-3
WORDS = 60
TEMPLATE = "{% for m in messages %}{{ m['content'] }} <end> {% endfor %}"
COMMON = {
    "hidden_size": 32, "intermediate_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8,
    "num_local_experts": 4, "num_experts_per_tok": 4, "vocab_size": WORDS + 3, "pad_token_id": 0, "eos_token_id": 1,
    "tie_word_embeddings": False, "max_position_embeddings": 512,
}  # fmt: skip


def conversations() -> list[list[str]]:
    """A question and an answer of 3 to 24 words each; the answer repeats the question's words, so it can be learned."""
    generator = torch.Generator().manual_seed(5)
    found = []
    for _ in range(DOCUMENTS):
        length = int(torch.randint(3, 25, (), generator=generator))
        words = [f"w{i}" for i in torch.randint(0, WORDS, (length,), generator=generator).tolist()]
        found.append([" ".join(words), " ".join(reversed(words))])
    return found


def write(folder: Path) -> None:
    import pandas
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    words = {"<pad>": 0, "<end>": 1, "<unknown>": 2, **{f"w{i}": i + 3 for i in range(WORDS)}}
    inner = Tokenizer(models.WordLevel(words, unk_token="<unknown>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="<end>", unk_token="<unknown>", chat_template=TEMPLATE
    )
    tokenizer.save_pretrained(folder / "model")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt_oss", **COMMON), attn_implementation="eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):
                parameter.copy_(torch.tensor([4.0, 8.0, 20.0, float(torch.randn(()))]))
            elif parameter.dim() > 1:
                parameter.normal_(std=0.3)
    model.save_pretrained(folder / "model")
    rows = [
        [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        for question, answer in conversations()
    ]
    pandas.DataFrame({"messages": rows}).to_parquet(folder / "train.parquet")


def tokens(tokenizer: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Ids and loss mask (the answer and its end) of each document."""
    found = []
    for question, answer in conversations():
        parts = [tokenizer(f"{text} <end>")["input_ids"] for text in (question, answer)]
        ids = torch.tensor([*parts[0], *parts[1]])
        found.append((ids, torch.arange(len(ids)) >= len(parts[0])))
    return found


def reference(folder: Path) -> list[float]:
    """The loss of each step, of documents that are alone: no packing, no patch, no verl."""
    from torch.utils.data import DistributedSampler
    from transformers import AutoModelForCausalLM, AutoTokenizer

    documents = tokens(AutoTokenizer.from_pretrained(folder / "model"))
    model = AutoModelForCausalLM.from_pretrained(folder / "model", attn_implementation="eager", dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.01, betas=(0.9, 0.999))
    samplers = [
        DistributedSampler(documents, shuffle=True, num_replicas=RANKS, rank=rank, drop_last=True)
        for rank in range(RANKS)
    ]
    losses: list[float] = []
    each = BATCH // RANKS
    for epoch in range(STEPS * BATCH // DOCUMENTS):
        orders = []
        for sampler in samplers:
            sampler.set_epoch(epoch)
            orders.append(list(sampler))
        for step in range(DOCUMENTS // BATCH):
            batch = [documents[i] for order in orders for i in order[step * each : (step + 1) * each]]
            total = sum(int(mask.sum()) for _, mask in batch)
            loss = torch.zeros(())
            for ids, mask in batch:
                logits = model(input_ids=ids[None], use_cache=False).logits[0]
                targets = torch.where(mask, ids, -100)[1:]
                loss = loss + torch.nn.functional.cross_entropy(logits[:-1], targets, reduction="sum") / total
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss))
    return losses


def command(folder: Path, attention: str | None = "eager") -> list[str]:
    """The job's own command line after ``python``; ``attention`` None leaves verl's default."""
    chosen = [] if attention is None else [f"+model.override_config.attn_implementation={attention}"]
    return [
        "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS),
        "-m", "verl.trainer.sft_trainer",
        f"model.path={folder / 'model'}",
        *chosen,
        "model.enable_gradient_checkpointing=False",
        f"data.train_files={folder / 'train.parquet'}",
        f"data.train_batch_size={BATCH}",
        "data.max_token_len_per_gpu=1024",
        "data.num_workers=0",
        "engine.strategy=fsdp2",
        "engine.use_torch_compile=False",
        "+engine.mixed_precision.param_dtype=fp32",
        f"optim.lr={LEARNING_RATE}",
        "trainer.device=cpu",
        "trainer.logger=[file]",
        f"trainer.total_epochs={STEPS * BATCH // DOCUMENTS}",
        "checkpoint.save_contents=[]",
        "trainer.resume_mode=disable",
        f"trainer.default_local_dir={folder / 'checkpoints'}",
    ]  # fmt: skip


if __name__ == "__main__":
    target = Path(sys.argv[1])
    write(target)
    (target / "reference.json").write_text(json.dumps(reference(target)), encoding="utf-8")
