"""Makes golden/trl.npz: losses, gradients and metrics of TRL's own functions on the arrays of `arrays.py`.

Run with TRL 1.16 and torch: `python -m tests.post_training.make_golden`. The trainers are made without their
constructors, with the few attributes that their losses read, and a model that returns stored logits.
"""

import importlib.machinery
import importlib.util
import sys
import types
from collections import defaultdict
from pathlib import Path
from unittest import mock

import numpy as np
import torch

if importlib.util.find_spec("pyarrow") is None:  # TRL imports these, its losses do not use them
    for name in ("pandas", "datasets", "datasets.fingerprint", "pyarrow", "pyarrow.compute", "pyarrow.types"):
        spec = importlib.machinery.ModuleSpec(name, None)
        sys.modules[name] = mock.MagicMock(__spec__=spec, __path__=[], __version__="99.0.0")

from trl.experimental.cpo.cpo_trainer import CPOTrainer
from trl.experimental.gkd.gkd_trainer import GKDTrainer
from trl.experimental.orpo.orpo_trainer import ORPOTrainer
from trl.experimental.server_distillation.server_distillation_trainer import _add_tail_bucket, _jsd_divergence
from trl.trainer.dpo_trainer import DPOTrainer
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.kto_trainer import KTOTrainer
from trl.trainer.rloo_trainer import RLOOTrainer

from tests.post_training.arrays import PAIRS, TEMPERATURE, V, arrays

PATH = Path(__file__).parent / "golden" / "trl.npz"
DATA = {name: torch.tensor(x) for name, x in arrays().items()}
IDS, MASK = DATA["ids"].long(), DATA["completion"][:, 1:]
KEPT = (
    "kl",
    "entropy",
    "rewards/",
    "logps/",
    "log_odds",
    "clip_ratio/low_mean",
    "clip_ratio/high_mean",
    "clip_ratio/region_mean",
)


class Accelerator:
    """A stub for one process: gathering returns the input."""

    device, num_processes, process_index, sync_gradients = torch.device("cpu"), 1, 0, True
    gather = gather_for_metrics = staticmethod(lambda x: x)
    reduce = staticmethod(lambda x, reduction: x)
    unwrap_model = staticmethod(lambda x: x)
    pad_across_processes = staticmethod(lambda x, **_: x)


def scores(logits, temperature=1.0):
    """The output of TRL's patched models: log-probabilities and entropies of the next ids."""
    log_p = torch.log_softmax(logits / temperature, -1)
    log_probs = log_p.gather(-1, IDS[:, 1:, None])[..., 0]
    return log_probs, -(log_p.exp() * log_p).sum(-1)


def model(logits):
    log_probs, entropy = scores(logits)
    fields = {"log_probs": log_probs * MASK, "entropy": entropy, "mean_logits": logits.mean(-1), "is_top1": entropy > 0}
    fields["log_sum_sq_probs"] = torch.logsumexp(2 * torch.log_softmax(logits, -1), -1)
    return lambda **_: types.SimpleNamespace(**fields)


def trainer(cls, **attributes):
    out = object.__new__(cls)
    common = {"accelerator": Accelerator(), "model": types.SimpleNamespace(training=True), "aux_loss_enabled": False}
    common |= {"_metrics": defaultdict(lambda: defaultdict(list)), "_total_train_tokens": 0, "_tp_size": 1}
    for name, value in (common | attributes).items():
        object.__setattr__(out, name, value)
    return out


def case(run):
    """Loss, gradient of the logits, and metrics of one run of TRL's code."""
    logits = DATA["logits"].clone().requires_grad_()
    loss, metrics = run(logits)
    loss.backward()
    kept = {f"metric/{name}": v for name, v in metrics.items() if name.startswith(KEPT)}
    return {"loss": loss.item(), "gradient": logits.grad.numpy(), **kept}


def dpo(kind, loss_weights=None, label_smoothing=0.0, beta=0.3, **settings):
    def run(logits):
        attributes = {
            "args": types.SimpleNamespace(discopop_tau=0.05),
            "ld_alpha": None,
            "precompute_ref_logps": True,
            "f_divergence_type": "reverse_kl",
            "loss_types": [kind] if isinstance(kind, str) else list(kind),
            "loss_weights": [1.0] if loss_weights is None else loss_weights,
            "beta": beta,
            "label_smoothing": label_smoothing,
            "use_weighting": False,
        }
        theirs = trainer(DPOTrainer, **attributes | settings)
        # As TRL precomputes them, with the weights of LD-DPO.
        lengths = torch.stack(MASK.sum(1).split(PAIRS)).min(0).values.repeat(2)
        is_tail = MASK.cumsum(1) > lengths[:, None]
        weights = torch.where(is_tail, 1.0 if theirs.ld_alpha is None else theirs.ld_alpha, 1.0)
        reference = (DATA["reference_log_probs"] * MASK * weights).sum(1)
        inputs = {
            "input_ids": IDS,
            "attention_mask": DATA["attention"],
            "completion_mask": DATA["completion"],
            "ref_chosen_logps": reference[:PAIRS],
            "ref_rejected_logps": reference[PAIRS:],
        }
        loss = theirs._compute_loss(model(logits), inputs, False)
        return loss, {name: values[-1] for name, values in theirs._metrics["train"].items()}

    return run


def means(logits):
    log_probs, _ = scores(logits)
    return ((log_probs * MASK).sum(1) / MASK.sum(1)).split(PAIRS)


def rewards(chosen, rejected):
    return {"rewards/chosen": chosen.mean().item(), "rewards/rejected": rejected.mean().item()}


def simpo(logits):
    theirs = trainer(CPOTrainer, alpha=0.0, loss_type="simpo", beta=2.0, simpo_gamma=0.5, label_smoothing=0.1)
    losses, *both = theirs.cpo_loss(*means(logits))
    return losses.mean(), rewards(*both)


def orpo(logits):
    theirs = trainer(ORPOTrainer, beta=0.2)
    losses, *both, ratio, odds = theirs.odds_ratio_loss(*means(logits))
    every, text = scores(logits)[0], DATA["attention"][:, 1:].bool()
    nll = -every[:PAIRS][text[:PAIRS]].mean()
    odds_metrics = {"log_odds_ratio": ratio.item(), "log_odds_chosen": odds.item()}
    return nll - losses.mean(), rewards(*both) | odds_metrics


def cpo(kind):
    def run(logits):
        theirs = trainer(CPOTrainer, alpha=0.0, loss_type=kind, beta=0.2, label_smoothing=0.1 * (kind == "sigmoid"))
        sums = (scores(logits)[0] * MASK).sum(1).split(PAIRS)
        losses, *both = theirs.cpo_loss(*(means(logits) if kind == "ipo" else sums))
        nll = -scores(logits)[0][:PAIRS][MASK[:PAIRS] == 1].mean()
        return losses.mean() + 0.5 * nll, rewards(*both)

    return run


def kto(logits, loss_type="kto"):
    theirs = trainer(
        KTOTrainer,
        precompute_ref_logps=True,
        calculate_KL=loss_type == "kto",
        beta=0.4,
        loss_type=loss_type,
        desirable_weight=1.2,
        undesirable_weight=0.7,
    )
    object.__setattr__(theirs, "_compute_kl_logps", lambda *_: (scores(DATA["mismatched"])[0] * MASK).sum(1))
    reference = (DATA["reference_log_probs"] * MASK).sum(1)
    inputs = {
        "input_ids": IDS,
        "attention_mask": DATA["attention"],
        "completion_mask": DATA["completion"],
        "label": DATA["desirable"],
        "ref_logps": reference,
        "ref_KL_logps": reference,
    }
    loss = theirs._compute_loss(model(logits), inputs, False)
    return loss, {"kl": theirs._metrics["train"]["kl"][-1]}


def policy(cls=GRPOTrainer, *, weights=None, old="old", beta=0.0, entropy=0.0, tools=False, **settings):
    """A policy loss; the prompt is the first id, so all others are completion with their own mask."""
    learned = MASK * DATA["tool"] if tools else MASK

    def run(logits):
        args = types.SimpleNamespace(
            delta=settings.pop("delta", None),
            use_bias_correction_kl=settings.pop("corrected", False),
            sapo_temperature_pos=1.0,
            sapo_temperature_neg=1.05,
            vespo_k_pos=2.0,
            vespo_lambda_pos=3.0,
            vespo_k_neg=3.0,
            vespo_lambda_neg=2.0,
        )
        attributes = {
            "top_entropy_quantile": 1.0,
            "off_policy_mask_threshold": None,
            "importance_sampling_level": "token",
            "beta": beta,
            "args": args,
            "epsilon_low": 0.2,
            "epsilon_high": 0.2,
            "loss_type": "grpo",
            "use_vllm": weights is not None,
            "vllm_importance_sampling_correction": True,
            "current_gradient_accumulation_steps": 1,
            "_entropy_bonus_enabled": entropy != 0,
            "use_adaptive_entropy": False,
            "entropy_coef": entropy,
            "max_completion_length": 11,
        }
        theirs = trainer(cls, **attributes | settings)
        step_scores = scores(logits, TEMPERATURE)
        object.__setattr__(theirs, "_get_per_token_logps_and_entropies", lambda *_, **__: (*step_scores, None))
        inputs = {
            "prompt_ids": IDS[:, :1],
            "prompt_mask": torch.ones_like(IDS[:, :1]),
            "completion_ids": IDS[:, 1:],
            "completion_mask": MASK,
            "advantages": DATA["advantages"],
            "num_items_in_batch": learned.sum(),
            "ref_per_token_logps": DATA["reference_log_probs"],
            "old_logps": (DATA["old_log_probs"] * MASK).sum(1),
        }
        if tools:
            inputs["tool_mask"] = DATA["tool"]
        if old == "sampler":
            inputs["sampling_per_token_logps"] = DATA["sampler_log_probs"]
        if old is not None:
            inputs["old_per_token_logps"] = DATA["old_log_probs"]
        if weights is not None:
            inputs["importance_sampling_ratio"] = weights()
        theirs.args.steps_per_generation = 1
        loss = theirs._compute_loss(None, inputs)
        return loss, {name: values[-1] for name, values in theirs._metrics["train"].items()}

    return run


def sampler_weights(mode, low, high):
    """The ratios as `GRPOTrainer._generate_and_score_completions` makes them in the mode of that name."""
    difference = (DATA["old_log_probs"] - DATA["sampler_log_probs"]) * MASK
    difference = difference.sum(-1, keepdim=True) if mode.startswith("sequence") else difference
    ratio = difference.exp()
    if mode.endswith("truncate"):
        return ratio.clamp(min=low, max=high)
    return ratio.masked_fill((ratio < (low or 0)) | (ratio > high), 0.0)


def distilled(beta):
    labels = torch.where(MASK == 1, IDS[:, 1:], -100)

    def run(logits):
        return GKDTrainer.generalized_jsd_loss(logits, DATA["teacher"], labels, beta, TEMPERATURE), {}

    return run


def top_k(beta, k=3, of_student=False):
    def run(logits):
        teacher, student = (torch.log_softmax(x / TEMPERATURE, -1) for x in (DATA["teacher"], logits))
        ids = (student if of_student else teacher).topk(k).indices
        both = (student.gather(-1, ids), teacher.gather(-1, ids))
        both = [_add_tail_bucket(x, torch.ones_like(x, dtype=bool)) for x in both]
        divergence = _jsd_divergence(both[0][0], both[1][0], beta, both[0][1]).sum(-1)
        return (divergence * MASK).sum() / MASK.sum(), {}

    return run


CASES = {
    "dpo/sigmoid": dpo("sigmoid"),
    "dpo/robust": dpo("robust", label_smoothing=0.2),
    "dpo/hinge": dpo("hinge"),
    "dpo/ipo": dpo("ipo"),
    "dpo/apo_zero": dpo("apo_zero"),
    "dpo/apo_down": dpo("apo_down"),
    "dpo/sppo_hard": dpo("sppo_hard"),
    "dpo/nca_pair": dpo("nca_pair"),
    "dpo/bco_pair": dpo("bco_pair"),
    "dpo/sigmoid_norm": dpo("sigmoid_norm"),
    "dpo/mixture": dpo(("sigmoid", "bco_pair", "sft"), loss_weights=[0.8, 0.2, 0.5]),
    "dpo/exo_pair": dpo("exo_pair", label_smoothing=0.1),
    "dpo/discopop": dpo("discopop"),
    "dpo/aot": dpo("aot", label_smoothing=0.1),
    "dpo/aot_unpaired": dpo("aot_unpaired"),
    "dpo/forward_kl": dpo("sigmoid", beta=0.003, f_divergence_type="forward_kl"),
    "dpo/js_divergence": dpo("ipo", f_divergence_type="js_divergence"),
    "dpo/alpha_divergence": dpo("hinge", f_divergence_type="alpha_divergence", f_alpha_divergence_coef=0.4),
    "dpo/ld": dpo("sigmoid", ld_alpha=0.4),
    "dpo/wpo": dpo("sigmoid", use_weighting=True),
    "simpo": simpo,
    "orpo": orpo,
    **{f"cpo/{kind}": cpo(kind) for kind in ("sigmoid", "hinge", "ipo")},
    "kto": kto,
    "kto/apo_zero_unpaired": lambda logits: kto(logits, "apo_zero_unpaired"),
    "policy/grpo": policy(),
    "policy/grpo on-policy": policy(old=None),
    "policy/two-sided": policy(delta=1.3, epsilon_high=0.28),
    "policy/dr_grpo": policy(loss_type="dr_grpo"),
    "policy/dapo": policy(loss_type="dapo", epsilon_high=0.28),
    "policy/gspo": policy(importance_sampling_level="sequence", epsilon_low=0.05, epsilon_high=0.08),
    "policy/cispo": policy(loss_type="cispo", epsilon_high=1.1),
    "policy/k3": policy(beta=0.3, loss_type="dapo"),
    "policy/corrected": policy(beta=0.3, corrected=True, loss_type="dapo"),
    "policy/entropy": policy(entropy=0.1, loss_type="dapo"),
    "policy/rloo": policy(RLOOTrainer),
    **{
        f"policy/{mode}": policy(weights=lambda mode=mode: sampler_weights(mode, 0.5, 1.5), beta=0.2)
        for mode in ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
    },
    "tools/grpo": policy(tools=True, beta=0.3),
    "tools/dapo": policy(tools=True, loss_type="dapo", epsilon_high=0.28),
    "tools/gspo": policy(tools=True, importance_sampling_level="sequence", epsilon_low=0.05, epsilon_high=0.08),
    "tools/cispo": policy(tools=True, loss_type="cispo", epsilon_high=1.1),
    "tools/sapo": policy(tools=True, loss_type="sapo"),
    "tools/vespo": policy(tools=True, loss_type="vespo"),
    "tools/luspo": policy(
        tools=True, loss_type="luspo", importance_sampling_level="sequence", epsilon_low=0.05, epsilon_high=0.08
    ),
    "tools/off-policy": policy(tools=True, loss_type="dapo", off_policy_mask_threshold=0.2, old="sampler"),
    "tools/top entropy": policy(tools=True, loss_type="dapo", top_entropy_quantile=0.4, beta=0.3),
    "student_top_k/1.0": top_k(1.0, of_student=True),
    **{f"distillation/{beta}": distilled(beta) for beta in (0.0, 0.3, 1.0)},
    **{f"top_k/{beta}": top_k(beta) for beta in (0.0, 0.3, 1.0)},
}


def main() -> None:
    """Writes the results of all cases."""
    out = {f"{name}:{key}": value for name, run in CASES.items() for key, value in case(run).items()}
    PATH.parent.mkdir(exist_ok=True)
    np.savez_compressed(PATH, **{name: np.asarray(value, np.float32) for name, value in out.items()})
    print(f"{len(CASES)} cases of {V} tokens, {PATH.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
