"""The charges behind a release.

If owners merged their data sets, they declared that no person is in two of these sets. The
declaration is kept with the charges.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

# Record of a charge, as in the journal. `sfumato.privacy.record.Record` defines its form
Record = dict[str, Any]


class Records(dict[str, Record]):
    """Charges by record id, in the order of ids.

    Attributes:
        owners: Ids of the merged data sets, if their owners declared that no person is in two of
            these sets. The cost for a person is then computed separately for each set, and the
            largest counts. Without the declaration, `owners` is empty, and the costs of all charges
            are added up. A copy as a plain dictionary loses the declaration.
    """

    def __init__(
        self, records: Mapping[str, Record] | None = None, owners: Iterable[str] = ()
    ) -> None:
        super().__init__(sorted(dict(records or {}).items()))
        self.owners = tuple(owners)

    @classmethod
    def of(cls, rows: Iterable[Record], owners: Iterable[str] = ()) -> Records:
        return cls({row["id"]: row for row in rows}, owners)

    @classmethod
    def of_ledger(cls, ledger: Mapping) -> Records:
        """Return the records of a ledger. The caller must have checked the form of the ledger."""
        return cls.of(ledger["records"], ledger.get("apart", ()))

    def of_one_person(self) -> dict[str, Records]:
        """Map each data set of `owners` to the records that can depend on a person in it.

        These are the set's own records, and the records of data sets outside `owners`, which may
        contain any person. If `owners` is empty, all records are under "".

        Guarantee: if a person is in at most one of `owners`, only these records depend on that
        person.
        """
        if not self.owners:
            return {"": self}
        return {
            name: Records(
                {
                    key: r
                    for key, r in self.items()
                    if r["dataset_id"] == name or r["dataset_id"] not in self.owners
                }
            )
            for name in self.owners
        }

    def of_stage(self, stage: str) -> Records:
        return Records({key: r for key, r in self.items() if r["stage"] == stage}, self.owners)

    def declaration(self) -> dict[str, list[str]]:
        """Return `owners` as the entry `apart` of a JSON file, or no entry if `owners` is empty."""
        if self.owners:
            return {"apart": sorted(self.owners)}
        return {}

    @property
    def units(self) -> list[str]:
        """Return the privacy units of the records, sorted."""
        return sorted({record["unit"] for record in self.values()})

    def composition_problem(self) -> str | None:
        """Describe why the records cannot be composed, or return None.

        They cannot be composed if they protect different units, if `owners` has a single data set,
        or if one of its data sets has no record.
        """
        if len(self.units) > 1:
            return (
                f"its records have different privacy units ({', '.join(self.units)}), so they "
                "cannot be composed"
            )
        if not self.owners:
            return None
        dataset_ids = {record["dataset_id"] for record in self.values()}
        if len({*self.owners}) < 2:
            return (
                "it declares that merged data sets share no person, but names only one data set, "
                f"{self.owners[0]}: expected two or more"
            )
        if not {*self.owners} <= dataset_ids:
            return (
                f"it declares that the data sets {', '.join(self.owners)} share no person, but it "
                "has no records of some of these data sets"
            )
        return None


def widest_declaration(parts: Iterable[Records]) -> tuple[str, ...]:
    """Return the declaration (`owners`) that contains the declarations of all parts.

    If no part has such a declaration, return an empty one, so that all costs are added up.
    """
    declared = [part.owners for part in parts]
    widest = max(declared, key=len, default=())
    if all({*owners} <= {*widest} for owners in declared):
        return widest
    return ()
