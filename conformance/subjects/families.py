"""Shipped subjects, one for each family of this project, and references made from families."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from conformance.subject import Reference, Subject
from conformance.template import FileList, Leaf


def subject(name: str) -> Subject:
    raise NotImplementedError(name)


def reference_for_titan(model: str, config: Any, leaves: Mapping[str, Leaf]) -> Reference | None:
    return None


def file_list_of_config(config: dict[str, Any]) -> FileList:
    raise NotImplementedError
