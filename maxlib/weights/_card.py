"""Model cards: the README.md of a model, with front matter for the hub."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import maxlib


@dataclasses.dataclass(frozen=True)
class ModelCard:
    """Content of a model's README.md, written by `save_pretrained(model_card=ModelCard(...))`.

    Attributes:
        title: Title; None uses the name of the directory.
        text: Markdown for readers: what the model is for, how it was trained.
        license: The hub's identifier of the license, such as "apache-2.0".
        base_model: Name on the hub of the base model.
        datasets: Names on the hub of the training datasets.
        language: Codes of its languages, such as "en".
        tags: Additional search tags.
        metrics: Results by name, written as a table.
        commit: Commit of the code that trained it.
    """

    title: str | None = None
    text: str = ""
    license: str | None = None
    base_model: str | None = None
    datasets: tuple[str, ...] = ()
    language: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
    commit: str | None = None

    def render(self, *, title: str, architecture: str, parameters: int) -> str:
        """Returns the text of README.md, front matter first.

        Args:
            title: Title if the card has none.
            architecture: Class of the model, as config.json names it.
            parameters: Number of parameters.
        """
        parts = [_front_matter(self._fields()), f"# {self.title or title}", self.text.strip()]
        about = f"`{architecture}` with {parameters:,} parameters, written by maxlib {maxlib.__version__}"
        parts.append(about + (f" at commit `{self.commit}`." if self.commit else "."))
        if self.metrics:
            rows = [f"| {name} | {value:.6g} |" for name, value in self.metrics.items()]
            parts.append("\n".join(["| metric | value |", "|---|---|", *rows]))
        return "\n\n".join(part for part in parts if part) + "\n"

    def _fields(self) -> dict[str, Any]:
        lists = {"datasets": self.datasets, "language": self.language, "tags": ("maxlib", *self.tags)}
        plain = {"license": self.license, "base_model": self.base_model, "library_name": "transformers"}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in (plain | lists).items()}


def write_card(card: ModelCard | bool, path: Path, *, title: str, config: Mapping[str, Any], parameters: int) -> None:
    """Writes `card`, or a default card, to `path`."""
    card = ModelCard() if isinstance(card, bool) else card
    architecture = (config.get("architectures") or [config.get("model_type", "a model")])[0]
    path.write_text(card.render(title=title, architecture=architecture, parameters=parameters), encoding="utf-8")


def _front_matter(fields: Mapping[str, Any]) -> str:
    """Returns front matter with JSON values, which are valid YAML, so that no value can break out of its line."""
    lines = [f"{name}: {json.dumps(value)}" for name, value in fields.items() if value]
    return "\n".join(["---", *lines, "---"])
