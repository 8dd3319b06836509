"""The readers of files that are fuzzed."""

import contextlib
import dataclasses
import functools
import io
import itertools
import json
import logging
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from etils import epath
from flax import nnx
from jinja2.exceptions import SecurityError
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from maxlib import adapters, checkpoint, data, observability, weights
from maxlib._command import parser
from maxlib._command.plan import _job
from maxlib.checkpoint import _lock as lock
from maxlib.distributed import xla_flags
from maxlib.inference import stop_tokens
from maxlib.plan import _program as program
from maxlib.plan import parse_target
from maxlib.plan._job import check_names
from maxlib.quantization import _files as quantized
from maxlib.quantization import _formats as formats
from maxlib.sharding import Layout, parse_degrees, preset, preset_name
from maxlib.tokenization import ChatTemplate, load_tokenizer, save_tokenizer, train_bpe
from maxlib.weights import _family, files
from tests.nn.tiny import filled_llama


@dataclasses.dataclass(frozen=True)
class Target:
    """A reader of files.

    make: writes whole ones into a directory. read: reads them. kinds: how each is damaged (`mutate`), those that are
    not named stay whole. errors: what it may raise. names_file: its messages name the file. alone: one of the files is
    read at a time, under the last part of its name. gib: address space that may be added. needs: a package without
    which there is no target.
    """

    make: Callable[[Path], None]
    read: Callable[[Path], Any]
    kinds: dict[str, str]
    errors: tuple[type[BaseException], ...] = (ValueError, FileNotFoundError)
    names_file: bool = True
    alone: bool = False
    gib: float = 1.0
    needs: str = "json"


@functools.cache
def base():
    return filled_llama()


def make_adapters(directory: Path) -> None:
    adapters.save(adapters.add(base(), adapters.LoRA(2, 4), rngs=nnx.Rngs(0)), directory)


def read_adapters(directory: Path) -> None:
    """PEFT directories: the configuration and the tensors of adapters."""
    adapters.load(base(), directory)


TEXTS = [f"document {i} of some, é" for i in range(6)]


def make_array_record(directory: Path) -> None:
    from array_record.python.array_record_module import ArrayRecordWriter

    writer = ArrayRecordWriter(str(directory / "a.array_record"), "group_size:1")
    for text in TEXTS:
        writer.write(json.dumps({"text": text}).encode())
    writer.close()
    with tempfile.TemporaryDirectory() as folder:
        data.write_tokens(data.in_memory(TEXTS), folder, train_bpe(TEXTS, vocab_size=300))
        for name in ("manifest.json", "tokens-00000.array_record"):
            shutil.copy(Path(folder) / name, directory / name)


def read_array_record(directory: Path) -> None:
    """ArrayRecord files: of texts, and of tokens with the manifest beside them."""
    texts = data.array_record(directory / "a.array_record", field="text")
    for i in range(min(len(texts), 10)):
        assert (texts[i] or {})["text"] in TEXTS, "another text"
    tokens = data.read_tokens(directory)
    for i in range(min(len(tokens), 10)):
        assert (tokens[i] or {})["tokens"].dtype == np.int32


TEMPLATE = """{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}<|user|>{{ m.content | trim }}
{%- elif m['role'] == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}{{ eos_token }}{% else %}
{{ m.content + '!' }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""


def make_chat_template(directory: Path) -> None:
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    config = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "add_bos_token": True}
    listed = [{"name": "default", "template": TEMPLATE}, {"name": "rag", "template": "{{ documents }}"}]
    (directory / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": listed}))
    names = {"eos_token": {"content": "</s>"}, "extra_special_tokens": {"image_token": "<img>"}}
    (directory / "special_tokens_map.json").write_text(json.dumps(names))
    (directory / "config.json").write_text(json.dumps({"model_type": "qwen3"}))


def read_chat_template(directory: Path) -> None:
    """Chat templates, and the files that name special tokens."""
    if (directory / "tokenizer_config.json").stat().st_size % 2:  # half of them without a file of their own
        (directory / "chat_template.jinja").unlink()
    template = ChatTemplate.from_directory(directory)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    assert len(template(messages)) <= 1 << 24


def presets() -> dict[str, dict]:
    """Two published configurations of each family, by a file's name."""
    some = ((f, name, cfg) for f in weights.families() for name, cfg in itertools.islice(f.presets.items(), 2))
    return {
        f"{family.name}-{name.replace('/', '-')}/config.json": family.fields.write(cfg) for family, name, cfg in some
    }


def make_config(directory: Path) -> None:
    for name, config in presets().items():
        (directory / name).parent.mkdir(parents=True)
        (directory / name).write_text(json.dumps(config))


def make_generation(directory: Path) -> None:
    (directory / "config.json").write_text(json.dumps({"eos_token_id": [1, 2], "text_config": {"eos_token_id": 3}}))
    fields = {"eos_token_id": [2, 106], "do_sample": True, "temperature": 0.6, "transformers_version": "5.0.0"}
    (directory / "generation_config.json").write_text(json.dumps(fields))


def read_generation(directory: Path) -> None:
    """generation_config.json and config.json: the ids that end a text."""
    assert all(type(i) is int for i in stop_tokens(directory))


LAYOUTS = [
    "fsdp=-1,tensor=4 fsdp_tp",
    "data=2 dp+zero1",
    "stage=4 fsdp=2 pp:16x2",
    "expert=8 ep_tp",
    "context=4 cp_ring",
]


def make_layouts(directory: Path) -> None:
    for i, line in enumerate(LAYOUTS):
        (directory / str(i)).mkdir()
        (directory / str(i) / "layout").write_text(line)


def read_layouts(directory: Path) -> None:
    """Mesh degrees and strategies, as parsed by the commands."""
    *degrees, name = (directory / "layout").read_bytes().decode(errors="replace").split() or [""]
    strategy = preset(name)
    assert preset(preset_name(strategy)) == strategy, "another strategy"
    layout = Layout(parse_degrees(*degrees), strategy)
    assert layout.strategy == strategy and dict(layout.mesh.degrees) == parse_degrees(*degrees)
    xla_flags.options(name)


ITEMS = {"params": {"w": np.arange(50, dtype=np.float32)}, "opt": {"count": np.array(3, np.int32)}}


def make_manifest(directory: Path) -> None:
    with checkpoint.Checkpointer(directory) as saving:
        saving.save(1, ITEMS, data={"0": {"n": 1}}, meta={"note": "x"})


def read_manifest(directory: Path) -> None:
    """A checkpoint's records, arrays and owner file: damage is detected, or has no effect."""
    logging.disable()
    got = checkpoint.load(directory / "1")
    assert np.array_equal(got["params"]["w"], ITEMS["params"]["w"]) and got["opt"]["count"] == 3, "other weights"
    assert got["data"] == {"0": {"n": 1}} and got["meta"]["note"] == "x", "other records"


COLUMNS = {
    "text": TEXTS,
    "tokens": [[1, 2, i] for i in range(6)],
    "messages": [[{"role": "user", "content": "a"}, {"role": "assistant", "content": str(i)}] for i in range(6)],
}


def make_parquet(directory: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    for name, column in COLUMNS.items():
        parquet.write_table(pa.table({name: column}), directory / f"{name}.parquet", row_group_size=3)


def read_parquet(directory: Path) -> None:
    """Parquet files of texts, of tokens and of chats."""
    (path,) = directory.iterdir()
    documents = data.parquet(path, field=path.stem)
    for i in range(min(len(documents), 10)):
        documents[i]


COMMANDS = [
    "llama3-8b --target h100x16 --sequence 4096 --mesh fsdp=-1,tensor=2 --dcn data=2 --strategy fsdp_tp --remat full",
    "llama3-70b --target v5p-128 --per-device-batch-size 0.5 --mesh fsdp=8 context=8 --strategy fsdp+cp_ring",
    "llama3-70b --target v5e-256x2 --dcn data=-1 --flags tpu-overlap --microbatches 2 --attention splash",
    "mixtral-8x7b --target h200x32 --strategy ep+pp_1f1b:8x2 --mesh stage=4,expert=8",
    "llama3-8b --target h100x8 --lora rank=16,alpha=32,dora --base nf4 --remat q,k,v=offload --optimizer sgd",
    "llama3-8b --target cpu --loss maxlib.training:NextToken --batch a.b:c --search --compile 2",
]


def make_plan(directory: Path) -> None:
    for i, line in enumerate(COMMANDS):
        (directory / str(i)).mkdir()
        (directory / str(i) / "command").write_text(line)


def read_plan(directory: Path) -> None:
    """The arguments of `maxlib plan`, up to tracing the model."""
    words = (directory / "command").read_bytes().decode(errors="replace").split()
    status = 0
    try:
        with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
            args = parser("plan").parse_args(["plan", *words])
    except SystemExit as error:
        args, status = None, error.code
    assert status in (0, 2), status  # 0 for --help
    if args is None:
        return
    job = _job(args)
    check_names(job)
    if parse_target(job.target).platform == "cuda":
        program._rows(job, program._layout(job))


def make_quantized(directory: Path) -> None:
    stored = {
        "layers.groups.0.0.attn.q": {"weights": "int8", "activations": None, "gradients": None, "group": None},
        "layers.groups.0.0.mlp.up": {"weights": "nf4", "activations": None, "gradients": None, "group": 64},
    }
    layouts = {"layers": [[1, 4]]}
    manifest = {"version": 2, "formats": stored, "dtypes": dict.fromkeys(stored, "bfloat16"), "layouts": layouts}
    (directory / quantized.MANIFEST).write_text(json.dumps(manifest, indent=2))


def read_quantized(directory: Path) -> None:
    """quantization.json, which says how each weight of a quantized model is stored."""
    manifest = quantized._read(directory / quantized.MANIFEST)
    assert all(isinstance(kind, formats.Format) and str(kind) for kind in manifest["formats"].values())


def make_records(directory: Path) -> None:
    messages = [{"role": "user", "content": "é"}]
    lines = [json.dumps({"text": f"document {i} of some", "messages": messages}) for i in range(4)]
    (directory / "a.jsonl").write_text("\n".join(lines) + "\n")
    (directory / "c.jsonl").write_text("\n".join(lines) + "\n")
    (directory / "t.txt").write_text("one\n\ntwo\n")


READERS = {"a.jsonl": data.jsonl, "c.jsonl": data.chats, "t.txt": data.text_files}


def read_records(directory: Path) -> None:
    """Documents: JSON lines, chats, texts. Not ArrayRecord, whose reader hangs on some damaged files."""
    (path,) = directory.iterdir()
    documents = READERS[path.name](path)
    for i in range(min(len(documents), 10)):
        documents[i]


def make_report(directory: Path) -> None:
    fields = {"tokens_per_second": 5.0, "tokens": 9, "eval/loss": 2.0}
    rows = [{"step": i, "loss": 3.0 - i, **fields} for i in range(1, 6)]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (directory / "samples.jsonl").write_text(json.dumps({"step": 1, "prompt": "a", "text": "b"}) + "\n")
    (directory / "config.json").write_text(json.dumps({"lr": 1, "environment": {"devices": "x", "jax": "y"}}))
    lines = [{"session": 0, "time": 1.0, "begin": 0.0, "at": 0.0, "boot": "x"}]
    lines += [{"session": 0, "time": 2.0 + i, "at": 1.0 + i, "step": i, "seconds": {"step": 1.0}} for i in range(4)]
    (directory / "goodput.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def read_report(directory: Path) -> None:
    """metrics.jsonl, goodput.jsonl, samples and settings, and the report rendered from them."""
    observability.read_jsonl(directory / "metrics.jsonl")
    str(observability.goodput(directory))
    observability.report(directory, out=directory / "report.html")


def make_safetensors(directory: Path) -> None:
    dtypes = (np.float32, np.int8, np.float64)
    headers = [files.Header(f"layers.{i}.w", np.dtype(d), (i + 1, 3)) for i, d in enumerate(dtypes)]
    parts = files.shard(headers, 20)
    for name, part in parts.items():
        files.write_file(directory / name, part, (np.ones(h.shape, h.dtype) for h in part))
    files.write_index(directory, parts)


def read_safetensors(directory: Path) -> None:
    """The headers and the index of safetensors."""
    for stored in files.find_tensors(directory).values():
        assert stored.view().nbytes < 1000


@functools.cache
def tokenizers() -> dict[str, str]:
    """A tokenizer.json of each kind of model: byte-level BPE, and the parts of other kinds."""
    bpe = train_bpe(["a short text of some words", "another one, 12 é"] * 3, vocab_size=290)
    pieces = {"[UNK]": 0, "a": 1, "##b": 2, "hello": 3}
    words = Tokenizer(models.WordPiece(vocab=pieces, unk_token="[UNK]"))
    words.normalizer, words.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    unigram = Tokenizer(models.Unigram([("<unk>", 0.0), ("▁a", -1.0), ("b", -2.5)], unk_id=0, byte_fallback=False))
    unigram.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>"))
    kinds = {"bpe": bpe, "wordpiece": words, "unigram": unigram, "wordlevel": tokenizer}
    return {f"{name}/tokenizer.json": json.dumps(json.loads(kind.to_str())) for name, kind in kinds.items()}


def make_tokenizer(directory: Path) -> None:
    for name, text in tokenizers().items():
        (directory / name).parent.mkdir()
        (directory / name).write_text(text)
    saved = directory / "saved"
    save_tokenizer(train_bpe(["a b c"], vocab_size=270), saved, bos_token="<bos>", eos_token="<eos>")


def read_tokenizer(directory: Path) -> None:
    """tokenizer.json, each of `tokenizers` and a saved one."""
    tokenizer = load_tokenizer(directory)
    for text in ("", "Hello, world", "é 中\n\n12", "<bos>a", "\x00\ufdd0 " * 20):
        try:
            ids = tokenizer.encode(text).ids
        except Exception as error:
            if type(error) is not Exception:  # its own errors, which a text can meet later, are of that class
                raise
            continue
        tokenizer.decode(ids)


def make_tokens_manifest(directory: Path) -> None:
    counts = {"documents": 6, "tokens": 70, "characters": 140, "longest": 12}
    file = {"name": "tokens-00000.array_record", "bytes": 900, **counts}
    job = {"format": 1, "description": "some", "records": 6, "tokenizer": "00ff", "vocab_size": 300, "dtype": "<u2"}
    more = {"bos_id": None, "eos_id": 1, "documents_per_file": 50_000, "bad_records": 0}
    manifest = {**job, **more, "total": counts, "files": [file]}
    (directory / "manifest.json").write_text(json.dumps(manifest, indent=1))
    owner = {"run": "a" * 32, "pid": 12, "host": "there", "since": "2026-01-01 00:00:00"}
    (directory / lock.FILE).write_text(json.dumps(owner))


def read_tokens_manifest(directory: Path) -> None:
    """The manifest of pretokenized data, and the owner file of checkpoint directories."""
    if (owner := lock._read(epath.Path(directory / lock.FILE), tries=1)) is not None:
        assert not lock._is_mine(owner) and lock._describe(owner)
    manifest = data.read_manifest(directory)
    for file in manifest["files"]:
        assert (directory / file["name"]).parent == directory, "outside of its directory"


# The threads and compiled programs of a reader's libraries count as address space.
TARGETS = {
    "adapters": Target(
        make_adapters,
        read_adapters,
        {"adapter_config.json": "json", "adapter_model.safetensors": "safetensors"},
        gib=3.0,
    ),
    "array_record": Target(
        make_array_record,
        read_array_record,
        {"a.array_record": "bytes", "tokens-00000.array_record": "bytes", "manifest.json": "json"},
        gib=16.0,
    ),
    "chat_template": Target(
        make_chat_template,
        read_chat_template,
        {"chat_template.jinja": "template"}
        | dict.fromkeys(("tokenizer_config.json", "special_tokens_map.json", "config.json"), "json"),
        errors=(ValueError, FileNotFoundError, SecurityError),
        names_file=False,  # what a template itself says names none
    ),
    "config": Target(make_config, _family.read_model, dict.fromkeys(presets(), "json"), alone=True),
    "generation": Target(make_generation, read_generation, {"generation_config.json": "json", "config.json": "json"}),
    "layouts": Target(
        make_layouts,
        read_layouts,
        {f"{i}/layout": "arguments" for i in range(len(LAYOUTS))},
        names_file=False,
        alone=True,
    ),
    "manifest": Target(
        make_manifest,
        read_manifest,
        {f"1/{name}/{name}.json": "json" for name in ("manifest", "meta", "data")}
        | {"1/params/manifest.ocdbt": "bytes", "1/params/_METADATA": "json", "1/_CHECKPOINT_METADATA": "json"},
        errors=(checkpoint.DamagedError, ValueError, FileNotFoundError),
        gib=16.0,
    ),
    "parquet": Target(
        make_parquet,
        read_parquet,
        {f"{name}.parquet": "bytes" for name in COLUMNS},
        alone=True,
        gib=16.0,
        needs="pyarrow",
    ),
    "plan": Target(
        make_plan,
        read_plan,
        {f"{i}/command": "arguments" for i in range(len(COMMANDS))},
        errors=(ValueError, ImportError),
        names_file=False,
        alone=True,
    ),
    "quantized": Target(make_quantized, read_quantized, {quantized.MANIFEST: "json"}),
    "records": Target(
        make_records, read_records, {"a.jsonl": "jsonl", "c.jsonl": "jsonl", "t.txt": "bytes"}, alone=True
    ),
    "report": Target(
        make_report,
        read_report,
        {"metrics.jsonl": "jsonl", "goodput.jsonl": "jsonl", "samples.jsonl": "jsonl", "config.json": "json"},
    ),
    "safetensors": Target(
        make_safetensors,
        read_safetensors,
        {files.INDEX: "json"} | {f"model-{i:05}-of-00002.safetensors": "safetensors" for i in (1, 2)},
    ),
    "tokenizer": Target(
        make_tokenizer,
        read_tokenizer,
        {f"{name}/tokenizer.json": "json" for name in ("bpe", "wordpiece", "unigram", "wordlevel", "saved")},
        alone=True,
    ),
    "tokens_manifest": Target(make_tokens_manifest, read_tokens_manifest, {"manifest.json": "json", lock.FILE: "json"}),
}
