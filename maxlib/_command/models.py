"""`maxlib models [FAMILY ...]`."""

import argparse
import dataclasses
import json

from rich.console import Console
from rich.progress import track


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("family", metavar="FAMILY", nargs="*", help="list these only")
    parser.add_argument("--json", action="store_true", help="print one object for each preset")
    parser.add_argument("--markdown", action="store_true", help="print tables as the documentation has them")
    parser.add_argument("--names", action="store_true", help="print names only, which is quick")


def run(args: argparse.Namespace) -> int:
    from maxlib import weights

    known = {family.name: family for family in weights.families()}
    if unknown := [name for name in args.family if name not in known]:
        raise ValueError(f"there is no family {', '.join(unknown)}; there are {', '.join(known)}")
    chosen = [known[name] for name in args.family or known]
    if args.names:
        print("\n".join(preset for family in chosen for preset in family.presets))
        return 0
    from maxlib._command import listing

    presets = [(family, preset) for family in chosen for preset in family.presets]
    progress = Console(stderr=True)
    rows = [listing.row(*preset) for preset in track(presets, "reading models", console=progress, transient=True)]
    if args.json:
        print(json.dumps([_object(row) for row in rows], indent=1))
    elif args.markdown:
        print(listing.markdown(rows))
    else:
        listing.show(rows)
    return 0


def _object(row) -> dict:
    attention, features, caches, inputs = row.kind
    fields = {name: value for name, value in dataclasses.asdict(row).items() if name != "kind"}
    return fields | {
        "attention": ", ".join(attention),
        "features": ", ".join(features),
        "caches": " and ".join(caches),
        "images": "images" in inputs,
        "audio": "audio" in inputs,
    }
