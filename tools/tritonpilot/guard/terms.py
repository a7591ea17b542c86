"""What of a model's answers is guarded, and when they are called wrong: `guard` of its service file.

guard = Guard(share=0.05)
text = parameter(guard)            # as config.pbtxt has it, for the entry
of_parameter(text)                 # the same Guard; raises ValueError
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from tritonpilot.guard.compare import Tolerance
from tritonpilot.guard.watch import Settings
from tritonpilot.written import Written


class Guard(Written):
    """Whether the same input gets the same answer, and whether answers are distributed as usual (docs/guard.md)."""

    share: Annotated[float, Field(ge=0, le=1)] = Field(
        0.05, description="part of the requests that is sent again, in the lowest class, and compared"
    )
    repeats: bool = Field(True, description="compare equal requests that come by themselves, too")
    tolerance: Annotated[float, Field(ge=0, le=1)] = Field(
        1e-4, description="what floats of two answers may differ by: as they are up to 1, as a part of the value above"
    )
    tolerances: dict[str, Annotated[float, Field(ge=0, le=1)]] = Field({}, description="another one of an output")
    distribution: bool = Field(True, description="watch how the answers are distributed")
    reference: str | None = Field(
        None, description="file of `tritonpilot guard --learn`; default: the first answers after the entry's start"
    )
    reference_rows: Annotated[int, Field(ge=100, le=100_000)] = Field(1000, description="answers that make a reference")
    window_rows: Annotated[int, Field(ge=50, le=100_000)] = Field(300, description="answers that are held against it")
    rows_per_s: Annotated[float, Field(gt=0, le=10_000)] = Field(50, description="most answers that are looked at")
    psi: Annotated[float, Field(gt=0, le=100)] = Field(0.25, description="above it, and above chance, they drift")
    ks: Annotated[float, Field(gt=0, le=1)] = Field(0.2, description="as psi")
    constant: Literal["alarm", "allow"] = Field("alarm", description="all answers of a window alike")
    not_finite: Literal["alarm", "allow"] = Field("alarm", description="NaN or infinity in an answer")
    new_version_s: Annotated[float, Field(gt=0, le=31_536_000)] = Field(
        3600,
        description="a new version is held against the answers of the one before for so long, then has its own reference",
    )

    @property
    def allowed(self) -> Tolerance:
        """How far two answers may be apart."""
        return Tolerance(self.tolerance, self.tolerances)

    @property
    def settings(self) -> Settings:
        """When answers are distributed differently."""
        return Settings(self.reference_rows, self.window_rows, self.psi, self.ks, self.new_version_s)


def parameter(guard: Guard) -> str:
    """As a parameter of config.pbtxt; what is as by default is left out, and so is the name of the reference's file."""
    return guard.model_dump_json(exclude_defaults=True, exclude={"reference"})


def of_parameter(text: str) -> Guard:
    """Raises ValueError (pydantic's) for what is none."""
    return Guard.model_validate_json(text)
