"""TRL's trainers on the task of `learning`, with the same weights, rows in the same order, and learning rates.

Rollouts have the same prompts, but draw their own answers.
"""

import itertools
import statistics
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedTokenizerFast,
    TrainerCallback,
)
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    SFTConfig,
    SFTTrainer,
)

from tests.post_training import sorting

NAMES = {**{str(i): i for i in range(10)}, ">": sorting.SEPARATOR, ".": sorting.END, "_": sorting.PAD}


def run(what: str, directory: Path, seed: int, *, steps: int, rate: float, rows: int, group: int) -> dict[str, Any]:
    """Returns the seconds of making and running the trainer, and the trained model's score."""
    torch.manual_seed(seed)
    read = lambda name: AutoModelForCausalLM.from_pretrained(directory / name, dtype=torch.float32)
    model = read("model")
    shared: dict[str, Any] = {
        "output_dir": str(directory / "out"),
        "max_steps": steps,
        "learning_rate": rate,
        "per_device_train_batch_size": rows,
        "lr_scheduler_type": "linear" if what in ("dpo", "grpo", "ppo") else "cosine",
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "report_to": [],
        "save_strategy": "no",
        "logging_steps": 10,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "disable_tqdm": True,
        "seed": seed,
    }
    trained = (read("student"), model) if what == "distillation" else model
    if what == "ppo":
        critic = AutoModelForSequenceClassification.from_pretrained(directory / "critic", dtype=torch.float32)
        trained = (model, read("model"), critic)
    start, processor = time.perf_counter(), time.process_time()
    trainer = MAKE[what](trained, tokenizer(), shared, seed, steps, group)
    trainer.add_callback(times := Times())
    trainer.train()
    seconds, processor = time.perf_counter() - start, time.process_time() - processor
    score = exact((trainer.model.policy if what == "ppo" else trainer.model).eval(), seed)
    logs = [log for log in trainer.state.log_history if "reward" in log or "rewards/accuracies" in log]
    last = {name: logs[-1][name] for name in ("reward", "rewards/accuracies") if logs and name in logs[-1]}
    if what == "ppo":
        last = {"reward": statistics.fmean(log["objective/scores"] for log in trainer.state.log_history[-5:])}
    return {"seconds": seconds, "processor": processor, "step": times.median(), "figures": score | last}


class Times(TrainerCallback):
    """Remembers when each step ended."""

    def __init__(self):
        self.ends = []

    def on_step_end(self, *_, **__):
        self.ends.append(time.perf_counter())

    def median(self) -> float:
        return statistics.median(after - before for before, after in itertools.pairwise(self.ends))


def tokenizer() -> PreTrainedTokenizerFast:
    vocab = NAMES | {f"<{i}>": i for i in range(sorting.VOCAB) if i not in NAMES.values()}
    words = Tokenizer(models.WordLevel(vocab, unk_token="_"))
    words.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token=".", pad_token="_", padding_side="left")


def text(ids: list[int]) -> str:
    names = {i: name for name, i in NAMES.items()}
    return "".join(names[i] for i in ids)


def in_order(trainer: type) -> type:
    """A trainer that reads its data from the first row to the last."""
    sampler = lambda self, *_: torch.utils.data.SequentialSampler(self.train_dataset)
    return type("InOrder", (trainer,), {"_get_train_sampler": sampler})


def joined(make: Callable[[int], tuple], first: int, steps: int) -> list[list]:
    """The columns of all batches, whose seeds are those of `learning`."""
    batches = [make(first * 10**4 + number) for number in range(steps)]
    return [list(itertools.chain.from_iterable(column)) for column in zip(*batches, strict=True)]


def prompts(first: int, steps: int, count: int) -> Dataset:
    make = lambda seed: (sorting.lists(np.random.default_rng(seed), count),)
    (row,) = joined(make, first, steps)
    return Dataset.from_dict({"prompt": [text(sorting.prompt(x)) for x in row]})


def sft(model: Any, words: Any, shared: dict, seed: int, steps: int, group: int, peft: Any = None) -> Any:
    orders, first = ((False,), seed + 1) if peft is None else ((True,), seed + 101)
    rows = shared["per_device_train_batch_size"]
    questions, answers = joined(lambda seed: sorting.supervised(seed, rows, orders), first, steps)
    # Ids and masks, so that nothing is tokenized.
    both = list(zip(questions, answers, strict=True))
    masks = [[0] * len(question) + [1] * len(answer) for question, answer in both]
    data = Dataset.from_dict({"input_ids": [[*q, *a] for q, a in both], "completion_mask": masks})
    config = SFTConfig(**shared, max_length=None, completion_only_loss=True)
    return in_order(SFTTrainer)(model, args=config, train_dataset=data, processing_class=words, peft_config=peft)


def lora(model: Any, words: Any, shared: dict, seed: int, steps: int, group: int) -> Any:
    config = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    return sft(model, words, shared, seed, steps, group, config)


def dpo(model: Any, words: Any, shared: dict, seed: int, steps: int, group: int) -> Any:
    rows = shared["per_device_train_batch_size"]
    questions, chosen, rejected = joined(lambda seed: sorting.pairs(seed, rows), seed + 200, steps)
    columns = {
        "prompt": [text(q) for q in questions],
        "chosen": [text(a[:-1]) for a in chosen],  # TRL adds the end
        "rejected": [text(a[:-1]) for a in rejected],
    }
    config = DPOConfig(**shared, beta=0.1, max_length=None)
    data = Dataset.from_dict(columns)
    return in_order(DPOTrainer)(model, args=config, train_dataset=data, processing_class=words)


def grpo(model: Any, words: Any, shared: dict, seed: int, steps: int, group: int) -> Any:
    options = {
        "shuffle_dataset": False,
        "num_generations": group,
        "max_completion_length": sorting.NEW,
        "temperature": 1.0,
        "beta": 0.0,
        "epsilon": 0.2,
        "epsilon_high": 0.28,
        "loss_type": "dapo",
    }

    def reward(prompts: list, completion_ids: list, **_: Any) -> list[float]:
        ids = [words.encode(prompt) for prompt in prompts]
        return [sorting.reward(*both) for both in zip(ids, completion_ids, strict=True)]

    data = prompts(seed + 300, steps, shared["per_device_train_batch_size"] // group)
    config = GRPOConfig(**shared, **options)
    return GRPOTrainer(model, reward_funcs=reward, args=config, train_dataset=data, processing_class=words)


class Rewards(torch.nn.Module):
    """A function of rewards as the reward model that TRL's PPO asks for."""

    base_model_prefix = "ids"

    def ids(self, input_ids: Any, attention_mask: Any, **_: Any) -> Any:
        return types.SimpleNamespace(hidden_states=[torch.where(attention_mask.bool(), input_ids, -1)])

    def score(self, rows: Any) -> Any:
        texts = [[token for token in row if token >= 0] for row in rows.tolist()]
        ends = [text.index(sorting.SEPARATOR) + 1 for text in texts]
        scores = [sorting.reward(text[:end], text[end:]) for text, end in zip(texts, ends, strict=True)]
        return torch.tensor(scores)[:, None, None].expand(*rows.shape, 1)  # B -> B T 1


def ppo(models: Any, words: Any, shared: dict, seed: int, steps: int, group: int) -> Any:
    """TRL has had it until 1.6."""
    from trl.experimental.ppo import PPOConfig, PPOTrainer

    policy, reference, critic = models
    policy.generation_config.pad_token_id = sorting.PAD
    rows = shared["per_device_train_batch_size"]
    (lists,) = joined(lambda number: (sorting.lists(np.random.default_rng(number), rows),), seed + 600, steps)
    options = {
        "total_episodes": rows * steps,
        "response_length": sorting.NEW,
        "stop_token_id": sorting.END,
        "temperature": 1.0,
        "local_rollout_forward_batch_size": rows,
        "num_sample_generations": 0,
    }
    shared = {name: value for name, value in shared.items() if name != "max_steps"}
    return PPOTrainer(
        args=PPOConfig(**shared, **options),
        processing_class=words,
        model=policy,
        ref_model=reference,
        reward_model=Rewards(),
        value_model=critic,
        train_dataset=Dataset.from_dict({"input_ids": [sorting.prompt(x) for x in lists]}),
        eval_dataset=Dataset.from_dict({"input_ids": []}),
    )


def distillation(models: Any, words: Any, shared: dict, seed: int, steps: int, group: int) -> Any:
    from trl import DistillationConfig, DistillationTrainer  # which TRL 1.6, the last with PPO, lacks

    options = {"max_completion_length": sorting.NEW, "temperature": 1.0, "beta": 1.0, "shuffle_dataset": False}
    data = prompts(seed + 400, steps, shared["per_device_train_batch_size"])
    config = DistillationConfig(**shared, **options)
    student, teacher = models
    return DistillationTrainer(student, teacher, args=config, train_dataset=data, processing_class=words)


MAKE = {"sft": sft, "lora": lora, "dpo": dpo, "grpo": grpo, "ppo": ppo, "distillation": distillation}


@torch.no_grad()
def exact(model: Any, seed: int) -> dict[str, float]:
    """As in `learning`."""
    lists = sorting.lists(np.random.default_rng(10**6 + seed), 256)
    shares = {"up": 0, "down": 0}
    for digits in lists:
        ids = torch.tensor([sorting.prompt(digits)])
        new = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=sorting.NEW,
            do_sample=False,
            eos_token_id=sorting.END,
            pad_token_id=sorting.PAD,
        )[0, ids.shape[1] :].tolist()
        shares["up"] += new == sorting.answer(digits, False)
        shares["down"] += new == sorting.answer(digits, True)
    return {name: count / len(lists) for name, count in shares.items()}
