"""Writes `gptq.safetensors` and `awq.safetensors`: random words, and what GPTQModel makes of them.

    python -m tests.weights.packed.write DIRECTORY_OF_GPTQMODELS_SOURCE

Its functions are taken from the source, because the package needs a GPU's toolchain to install.
"""

import ast
import sys
import types
from pathlib import Path

import torch
from safetensors.torch import save_file

HERE = Path(__file__).parent


def function(source: Path, name: str) -> str:
    text = source.read_text()
    node = next(n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef) and n.name == name)
    lines = text.splitlines()[node.lineno - 1 : node.end_lineno]
    return "\n".join(line[node.col_offset :] for line in lines)


def gptq(source: Path) -> dict[str, torch.Tensor]:
    scope = {"t": torch, "_torch_right_shift": torch.bitwise_right_shift, "_torch_left_shift": torch.bitwise_left_shift}
    for name in ("dequantize_weight", "_dequantize_from_codes"):
        exec(function(source / "gptqmodel/nn_modules/qlinear/__init__.py", name), scope)
    tensors, I, O, groups = {}, 64, 32, 4
    for bits in (2, 3, 4, 8):
        wf = torch.arange(0, 32, bits, dtype=torch.int32)
        if bits == 3:
            wf = torch.tensor(
                [
                    [0, 3, 6, 9, 12, 15, 18, 21, 24, 27, 30, 0],
                    [0, 1, 4, 7, 10, 13, 16, 19, 22, 25, 28, 31],
                    [0, 2, 5, 8, 11, 14, 17, 20, 23, 26, 29, 0],
                ],
                dtype=torch.int32,
            )
        words = torch.randint(-(2**31), 2**31 - 1, (I * bits // 32, O), dtype=torch.int32)
        zeros = torch.randint(-(2**31), 2**31 - 1, (groups, O * bits // 32), dtype=torch.int32)
        module = types.SimpleNamespace(
            planar=False,
            bits=bits,
            maxq=2**bits - 1,
            pack_factor=32 // bits,
            in_features=I,
            dequant_dtype=torch.int16 if bits == 8 else torch.int8,
            qweight=words,
            qzeros=zeros,
            scales=torch.rand(groups, O).half() + 0.01,
            g_idx=torch.randint(0, groups, (I,), dtype=torch.int32),
            wf_unsqueeze_zero=wf.reshape(1, 3, 12) if bits == 3 else wf[None, None],
            wf_unsqueeze_neg_one=wf.reshape(1, 3, 12, 1) if bits == 3 else wf[None, :, None],
            _init_wf_unsqueeze_buffers=lambda: None,
        )
        module._dequantize_from_codes = types.MethodType(scope["_dequantize_from_codes"], module)
        for name in ("qweight", "qzeros", "scales", "g_idx"):
            tensors[f"{bits}.{name}"] = getattr(module, name)
        tensors[f"want.{bits}"] = scope["dequantize_weight"](module).T.contiguous()
    return tensors


def awq(source: Path) -> dict[str, torch.Tensor]:
    scope = {}
    exec((source / "gptqmodel/quantization/awq/utils/packing_utils.py").read_text(), scope)
    words = torch.randint(-(2**31), 2**31 - 1, (64, 4), dtype=torch.int32)
    zeros = torch.randint(-(2**31), 2**31 - 1, (2, 4), dtype=torch.int32)
    scales = torch.rand(2, 32).half() + 0.01
    want = scope["dequantize_gemm"](words, zeros, scales, 4, 32)
    return {"4.qweight": words, "4.qzeros": zeros, "4.scales": scales, "want.4": want.T.contiguous()}


if __name__ == "__main__":
    torch.manual_seed(0)
    for write in (gptq, awq):
        save_file(write(Path(sys.argv[1])), HERE / f"{write.__name__}.safetensors")
