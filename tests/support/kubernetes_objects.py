"""What Kubernetes takes, by its own schemas: unknown fields and wrong types are found.

core-1.33.json holds the strict schemas of Kubernetes 1.33 (from the package kubernetes-validate,
without descriptions) of the kinds that we render. jobset-v1alpha2.json is written by hand after the
types of kubernetes-sigs/jobset: strict, and only as much as we render; its jobs are checked as
Kubernetes' own.
"""

import json
from pathlib import Path
from typing import Any

import jsonschema

_FOLDER = Path(__file__).parent / "kubernetes"
_CORE: dict[str, Any] = json.loads((_FOLDER / "core-1.33.json").read_text())
_JOB_SET: dict[str, Any] = json.loads((_FOLDER / "jobset-v1alpha2.json").read_text())


def faults(thing: dict[str, Any]) -> list[str]:
    """Return what Kubernetes would refuse of an object, with its place in it."""
    schema = _JOB_SET if thing["kind"] == "JobSet" else _CORE[_name_of(thing)]
    checker = jsonschema.Draft202012Validator({**schema, "$defs": _CORE})
    return [f"{error.json_path}: {error.message}" for error in checker.iter_errors(thing)]


def _name_of(thing: dict[str, Any]) -> str:
    """Return the schema's name of an object: its group's first word, version and kind."""
    group, _, version = thing["apiVersion"].rpartition("/")
    end = f".{group.partition('.')[0] or 'core'}.{version}.{thing['kind']}"
    (name,) = (name for name in _CORE if name.endswith(end))
    return name
