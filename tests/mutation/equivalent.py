"""Mutants judged equivalent: no test distinguishes them from the program. ``equivalent.toml``."""

from pathlib import Path

import msgspec

from tests.mutation.mutants import Mutant, one_spaced

FILE = Path(__file__).with_name("equivalent.toml")


class Equivalent(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One judgement. It is found by text, so it stays true when lines move."""

    file: str
    statement: str  # as --list prints it, in any white space
    mutation: str  # before -> after
    why: str
    scope: str = ""  # the function or class, where a file has the statement more than once

    def is_about(self, mutant: Mutant) -> bool:
        """Return whether this judges a mutant."""
        return (
            self.file == mutant.file
            and one_spaced(self.statement) == mutant.statement
            and one_spaced(self.mutation) == mutant.mutation
            and self.scope in {"", mutant.scope}
        )


class _Judged(msgspec.Struct, forbid_unknown_fields=True):
    equivalent: list[Equivalent]


def judged(file: Path = FILE) -> list[Equivalent]:
    """Read the judgements."""
    return msgspec.toml.decode(file.read_bytes(), type=_Judged).equivalent
