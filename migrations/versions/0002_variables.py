"""Runs keep the names of the environment variables that their agent was given.

A column without a default: no row is rewritten, and workers of the version before go on without it.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None
compatible = True


def upgrade() -> None:
    op.add_column("runs", sa.Column("variables", postgresql.JSONB(none_as_null=True), nullable=True))


def downgrade() -> None:
    op.drop_column("runs", "variables")
