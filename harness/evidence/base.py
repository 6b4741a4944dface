# SPDX-License-Identifier: Apache-2.0
"""The base of all evidence."""

from pydantic import BaseModel, ConfigDict


class Evidence(BaseModel):
    """A part of a record: complete, frozen, and without fields that nobody declared."""

    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="constants")


class Observation(Evidence):
    """What a cell saw. Each type of it has a `kind` of its own, a literal, and may have more."""
