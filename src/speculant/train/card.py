"""data.json: what a folder of shards holds, and of which target."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .shards import write_text

NAME = "data.json"


@dataclass(frozen=True)
class DataCard:
    """Written when a folder's first shard is begun.

    target: fingerprint of the target that answered
    taps:   columns of the states files, LAST among them; () where none are noted
    recipe: what the shards are made of: under another one, a shard would not be the same
    """

    target: dict[str, Any]
    taps: tuple[int, ...]
    recipe: dict[str, Any]

    def write(self, folder: Path) -> None:
        """Put the card into a folder."""
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / NAME, json.dumps(asdict(self), indent=2) + "\n")


def read_card(folder: Path) -> DataCard | None:
    """The card of a folder, None where there is none. Raises ValueError for a broken one."""
    path = folder / NAME
    if not path.exists():
        return None
    try:
        data = json.loads(path.read_text())
        return DataCard(dict(data["target"]), tuple(data["taps"]), dict(data["recipe"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: not a data card ({error})") from None


def check_card(card: DataCard, folder: Path, target: Mapping[str, Any], name: str) -> None:
    """Raise ValueError when a folder's answers are another target's: a head must learn its own."""
    for key, mine in card.target.items():
        if mine != target.get(key):
            raise ValueError(
                f"{folder}: its answers are another target's than {name} ({key} differs): a draft "
                "learns from its own target's answers only; make data for it"
            )


def open_folder(folder: Path, card: DataCard, name: str) -> DataCard:
    """Begin a folder, or go on with it: then its own taps hold, and target and recipe must agree.

    A folder without a shard is begun anew: what stopped it before the first may be put right.
    """
    old = read_card(folder)
    if old is None or not any(folder.glob("shard-*.safetensors")):
        card.write(folder)
        return card
    check_card(old, folder, card.target, name)
    older = {"begun": 0.0} if "begun" in card.recipe else {}  # cards of before have no such share
    for key, mine in (older | old.recipe).items():
        if card.recipe.get(key) != mine:
            raise ValueError(
                f"{folder}: was begun with {key} = {mine}, not {card.recipe.get(key)}: repeat that, "
                "or give another folder"
            )
    return old
