"""The foundation: plans, tasks, dependencies, runs, workers, transcripts, minutes, agents, audit.

The claim's partial indexes, the storage settings of the hot tables and every CHECK are part of it; the reasons stand
beside them in orchestrator/domain/entities.py.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None
compatible = False


def upgrade() -> None:
    op.create_table(
        "agents",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("paused_at", postgresql.TIMESTAMP(timezone=True), nullable=True),
        sa.Column("paused_until", postgresql.TIMESTAMP(timezone=True), nullable=True),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.Column("actor", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("name", name=op.f("agents_pkey")),
    )
    op.create_table(
        "alert_looks",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column(
            "looked_at",
            postgresql.TIMESTAMP(timezone=True),
            server_default=sa.text("clock_timestamp()"),
            nullable=False,
        ),
        sa.CheckConstraint("id = 1", name=op.f("alert_looks_id_check")),
        sa.PrimaryKeyConstraint("id", name=op.f("alert_looks_pkey")),
    )
    op.create_table(
        "alerts",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=False), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("subject", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("task_id", sa.BigInteger(), nullable=True),
        sa.Column("plan", sa.Text(), nullable=True),
        sa.Column("what", sa.Text(), nullable=False),
        sa.Column("command", sa.Text(), nullable=True),
        sa.Column("heals", sa.Boolean(), server_default="false", nullable=False),
        sa.Column("since", postgresql.TIMESTAMP(timezone=True), nullable=True),
        sa.Column(
            "begun_at", postgresql.TIMESTAMP(timezone=True), server_default=sa.text("clock_timestamp()"), nullable=False
        ),
        sa.Column(
            "seen_at", postgresql.TIMESTAMP(timezone=True), server_default=sa.text("clock_timestamp()"), nullable=False
        ),
        sa.Column("ended_at", postgresql.TIMESTAMP(timezone=True), nullable=True),
        sa.CheckConstraint("ended_at >= begun_at", name=op.f("alerts_ended_at_check")),
        sa.PrimaryKeyConstraint("id", name=op.f("alerts_pkey")),
    )
    op.create_index(
        "alerts_ended", "alerts", ["ended_at"], unique=False, postgresql_where=sa.text("ended_at IS NOT NULL")
    )
    op.create_index("alerts_open", "alerts", ["kind", "key"], unique=True, postgresql_where=sa.text("ended_at IS NULL"))
    op.create_table(
        "audit",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=False), nullable=False),
        sa.Column(
            "at", postgresql.TIMESTAMP(timezone=True), server_default=sa.text("clock_timestamp()"), nullable=False
        ),
        sa.Column("actor", sa.Text(), nullable=False),
        sa.Column("action", sa.Text(), nullable=False),
        sa.Column("task_id", sa.BigInteger(), nullable=True),
        sa.Column("subject", sa.Text(), nullable=True),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.Column("details", postgresql.JSONB(none_as_null=True, astext_type=sa.Text()), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("audit_pkey")),
    )
    op.create_index(op.f("audit_task_id"), "audit", ["task_id"], unique=False)
    op.create_table(
        "breakers",
        sa.Column("login", sa.Text(), nullable=False),
        sa.Column("agents", postgresql.ARRAY(sa.Text()), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("message", sa.Text(), nullable=True),
        sa.Column("task_id", sa.BigInteger(), nullable=True),
        sa.Column(
            "opened_at",
            postgresql.TIMESTAMP(timezone=True),
            server_default=sa.text("clock_timestamp()"),
            nullable=False,
        ),
        sa.Column(
            "until", postgresql.TIMESTAMP(timezone=True), server_default=sa.text("clock_timestamp()"), nullable=False
        ),
        sa.Column("stated", sa.Boolean(), server_default="false", nullable=False),
        sa.Column("refusals", sa.Integer(), server_default="0", nullable=False),
        sa.Column("probe_by", sa.Uuid(), nullable=True),
        sa.Column("probe_until", postgresql.TIMESTAMP(timezone=True), nullable=True),
        sa.CheckConstraint("kind IN ('rate_limited', 'unauthenticated')", name=op.f("breakers_kind_check")),
        sa.CheckConstraint("(probe_by IS NULL) = (probe_until IS NULL)", name=op.f("breakers_probe_check")),
        sa.PrimaryKeyConstraint("login", name=op.f("breakers_pkey")),
    )
    op.create_table(
        "concurrency_limits",
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("max_running", sa.Integer(), nullable=False),
        sa.CheckConstraint("max_running > 0", name=op.f("concurrency_limits_max_running_check")),
        sa.PrimaryKeyConstraint("key", name=op.f("concurrency_limits_pkey")),
    )
    op.create_table(
        "minutes",
        sa.Column("minute", postgresql.TIMESTAMP(timezone=True), nullable=False),
        sa.Column("worker_id", sa.Uuid(), nullable=False),
        sa.Column("agent", sa.Text(), server_default="", nullable=False),
        sa.Column("claims", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("empty_claims", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("hold_ms", sa.Double(), server_default="0", nullable=False),
        sa.Column("holds", postgresql.ARRAY(sa.BigInteger()), server_default="{}", nullable=False),
        sa.Column("done", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("failed", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("other", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("tokens", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("cost_usd", sa.Double(), server_default="0", nullable=False),
        sa.Column("unknown_cost", sa.BigInteger(), server_default="0", nullable=False),
        sa.PrimaryKeyConstraint("minute", "worker_id", "agent", name=op.f("minutes_pkey")),
    )
    op.create_table(
        "plans",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=False), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column(
            "created_at",
            postgresql.TIMESTAMP(timezone=True),
            server_default=sa.text("clock_timestamp()"),
            nullable=False,
        ),
        sa.Column(
            "submitted_at",
            postgresql.TIMESTAMP(timezone=True),
            server_default=sa.text("clock_timestamp()"),
            nullable=False,
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("plans_pkey")),
        sa.UniqueConstraint("name", name=op.f("plans_name_key")),
    )
    op.create_table(
        "run_events",
        sa.Column("task_id", sa.BigInteger(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("seq", sa.Integer(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column(
            "at", postgresql.TIMESTAMP(timezone=True), server_default=sa.text("clock_timestamp()"), nullable=False
        ),
        sa.Column("text", sa.Text(), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=True),
        sa.PrimaryKeyConstraint("task_id", "attempt", "seq", name=op.f("run_events_pkey")),
    )
    op.create_table(
        "workers",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("host", sa.Text(), nullable=False),
        sa.Column("pid", sa.Integer(), nullable=False),
        sa.Column("boot_id", sa.Text(), nullable=True),
        sa.Column("pid_namespace", sa.Text(), nullable=True),
        sa.Column("process_started", sa.BigInteger(), nullable=True),
        sa.Column("token", sa.Text(), nullable=True),
        sa.Column("version", sa.Text(), nullable=True),
        sa.Column("slots", sa.Integer(), server_default="0", nullable=False),
        sa.Column("agents", postgresql.ARRAY(sa.Text()), server_default="{}", nullable=False),
        sa.Column("plan", sa.Text(), nullable=True),
        sa.Column("lease", postgresql.INTERVAL(), nullable=False),
        sa.Column("heartbeat", postgresql.INTERVAL(), nullable=False),
        sa.Column(
            "started_at",
            postgresql.TIMESTAMP(timezone=True),
            server_default=sa.text("clock_timestamp()"),
            nullable=False,
        ),
        sa.Column(
            "renewed_at",
            postgresql.TIMESTAMP(timezone=True),
            server_default=sa.text("clock_timestamp()"),
            nullable=False,
        ),
        sa.Column(
            "renewing_since",
            postgresql.TIMESTAMP(timezone=True),
            server_default=sa.text("clock_timestamp()"),
            nullable=False,
        ),
        sa.Column("draining_at", postgresql.TIMESTAMP(timezone=True), nullable=True),
        sa.Column("stopped_at", postgresql.TIMESTAMP(timezone=True), nullable=True),
        sa.Column("dead_at", postgresql.TIMESTAMP(timezone=True), nullable=True),
        sa.Column("dead_why", sa.Text(), nullable=True),
        sa.Column("held", sa.Integer(), nullable=True),
        sa.Column("deaf_since", postgresql.TIMESTAMP(timezone=True), nullable=True),
        sa.Column("clock_ahead", sa.Double(), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("workers_pkey")),
        postgresql_with={"fillfactor": 50},
    )
    op.create_index(
        "workers_live",
        "workers",
        ["id"],
        unique=False,
        postgresql_where=sa.text("stopped_at IS NULL AND dead_at IS NULL"),
    )
    op.create_table(
        "alert_deliveries",
        sa.Column("alert_id", sa.BigInteger(), nullable=False),
        sa.Column("hook", sa.Text(), nullable=False),
        sa.Column(
            "next_try_at",
            postgresql.TIMESTAMP(timezone=True),
            server_default=sa.text("clock_timestamp()"),
            nullable=False,
        ),
        sa.Column("tries", sa.Integer(), server_default="0", nullable=False),
        sa.Column("failures", sa.Integer(), server_default="0", nullable=False),
        sa.Column("begun_told_at", postgresql.TIMESTAMP(timezone=True), nullable=True),
        sa.Column("ended_told_at", postgresql.TIMESTAMP(timezone=True), nullable=True),
        sa.Column("gave_up_at", postgresql.TIMESTAMP(timezone=True), nullable=True),
        sa.Column("error", sa.Text(), nullable=True),
        sa.CheckConstraint(
            "ended_told_at IS NULL OR begun_told_at IS NOT NULL", name=op.f("alert_deliveries_order_check")
        ),
        sa.ForeignKeyConstraint(
            ["alert_id"], ["alerts.id"], name=op.f("alert_deliveries_alert_id_fkey"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("alert_id", "hook", name=op.f("alert_deliveries_pkey")),
    )
    op.create_index(
        "alert_deliveries_open",
        "alert_deliveries",
        ["next_try_at"],
        unique=False,
        postgresql_where=sa.text("ended_told_at IS NULL AND gave_up_at IS NULL"),
    )
    op.create_table(
        "tasks",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=False), nullable=False),
        sa.Column("agent", sa.Text(), nullable=False),
        sa.Column("status", sa.Text(), server_default="pending", nullable=False),
        sa.Column("priority", sa.Integer(), server_default="0", nullable=False),
        sa.Column("attempt", sa.Integer(), server_default="0", nullable=False),
        sa.Column("retry_count", sa.Integer(), server_default="0", nullable=False),
        sa.Column("lost_count", sa.Integer(), server_default="0", nullable=False),
        sa.Column("limited_count", sa.Integer(), server_default="0", nullable=False),
        sa.Column("limited_since", postgresql.TIMESTAMP(timezone=True), nullable=True),
        sa.Column("max_retries", sa.Integer(), nullable=True),
        sa.Column("retry", postgresql.JSONB(none_as_null=True, astext_type=sa.Text()), nullable=True),
        sa.Column("budget_seconds", sa.Double(), nullable=True),
        sa.Column("budget_tokens", sa.BigInteger(), nullable=True),
        sa.Column("budget_usd", sa.Double(), nullable=True),
        sa.Column("budget_turns", sa.Integer(), nullable=True),
        sa.Column("on_limit", sa.Text(), nullable=True),
        sa.Column(
            "available_at",
            postgresql.TIMESTAMP(timezone=True),
            server_default=sa.text("clock_timestamp()"),
            nullable=False,
        ),
        sa.Column("due", sa.Boolean(), server_default="true", nullable=False),
        sa.Column(
            "created_at",
            postgresql.TIMESTAMP(timezone=True),
            server_default=sa.text("clock_timestamp()"),
            nullable=False,
        ),
        sa.Column("started_at", postgresql.TIMESTAMP(timezone=True), nullable=True),
        sa.Column("finished_at", postgresql.TIMESTAMP(timezone=True), nullable=True),
        sa.Column("claimed_by", sa.Uuid(), nullable=True),
        sa.Column("cancel_requested_at", postgresql.TIMESTAMP(timezone=True), nullable=True),
        sa.Column("held_at", postgresql.TIMESTAMP(timezone=True), nullable=True),
        sa.Column("needs_approval", sa.Boolean(), server_default="false", nullable=False),
        sa.Column("title", sa.Text(), nullable=True),
        sa.Column("name", sa.Text(), nullable=True),
        sa.Column("plan", sa.Text(), nullable=True),
        sa.Column("plan_id", sa.BigInteger(), nullable=True),
        sa.Column("plan_order", sa.Integer(), nullable=True),
        sa.Column("superseded_at", postgresql.TIMESTAMP(timezone=True), nullable=True),
        sa.Column("task_hash", sa.Text(), nullable=True),
        sa.Column("definition", sa.Text(), nullable=True),
        sa.Column(
            "route",
            sa.Text(collation="C"),
            sa.Computed(
                "agent || coalesce(E'\\x1f' || definition, '') || coalesce(E'\\x1e' || md5(concurrency_key), '')",
                persisted=True,
            ),
            nullable=False,
        ),
        sa.Column("dir", sa.Text(), nullable=True),
        sa.Column("unique_key", sa.Text(), nullable=True),
        sa.Column("concurrency_key", sa.Text(), nullable=True),
        sa.Column("tags", postgresql.JSONB(none_as_null=True, astext_type=sa.Text()), nullable=True),
        sa.Column("input", postgresql.JSONB(none_as_null=True, astext_type=sa.Text()), nullable=True),
        sa.Column("params", postgresql.JSONB(none_as_null=True, astext_type=sa.Text()), nullable=True),
        sa.Column("template", sa.Boolean(), server_default="false", nullable=False),
        sa.Column("is_parent", sa.Boolean(), server_default="false", nullable=False),
        sa.Column("result", postgresql.JSON(none_as_null=True, astext_type=sa.Text()), nullable=True),
        sa.Column("error_class", sa.Text(), nullable=True),
        sa.Column("error_cause", sa.Text(), nullable=True),
        sa.Column("error_message", sa.Text(), nullable=True),
        sa.Column("session", sa.Text(), nullable=True),
        sa.Column("progress_percent", sa.Double(), nullable=True),
        sa.Column("progress_message", sa.Text(), nullable=True),
        sa.Column("last_output", sa.Text(), nullable=True),
        sa.Column("last_output_at", postgresql.TIMESTAMP(timezone=True), nullable=True),
        sa.Column("meter", postgresql.JSONB(none_as_null=True, astext_type=sa.Text()), nullable=True),
        sa.Column("live_usage", postgresql.JSONB(none_as_null=True, astext_type=sa.Text()), nullable=True),
        sa.Column("workspace", postgresql.JSONB(none_as_null=True, astext_type=sa.Text()), nullable=True),
        sa.Column("traceparent", sa.Text(), nullable=True),
        sa.CheckConstraint(
            "(finished_at IS NOT NULL) = (status IN ('done', 'failed', 'cancelled'))",
            name=op.f("tasks_finished_at_check"),
        ),
        sa.CheckConstraint("(status = 'running') = (claimed_by IS NOT NULL)", name=op.f("tasks_claimed_by_check")),
        sa.CheckConstraint("agent <> ''", name=op.f("tasks_agent_check")),
        sa.CheckConstraint(
            "error_class IS NULL OR error_class IN ('done', 'transient', 'rate_limited', 'unauthenticated', 'permanent', 'timed_out', 'stalled', 'over_budget', 'suspended', 'cancelled', 'interrupted', 'lost')",
            name=op.f("tasks_error_class_check"),
        ),
        sa.CheckConstraint(
            "on_limit IS NULL OR on_limit IN ('fail', 'finish_turn', 'ask')", name=op.f("tasks_on_limit_check")
        ),
        sa.CheckConstraint(
            "status <> 'running' OR (started_at IS NOT NULL AND attempt > 0)", name=op.f("tasks_running_check")
        ),
        sa.CheckConstraint(
            "status IN ('pending', 'running', 'blocked', 'waiting', 'done', 'failed', 'cancelled')",
            name=op.f("tasks_status_check"),
        ),
        sa.CheckConstraint("attempt >= 0 AND retry_count >= 0 AND lost_count >= 0", name=op.f("tasks_counts_check")),
        sa.CheckConstraint("budget_seconds IS NULL OR budget_seconds > 0", name=op.f("tasks_budget_seconds_check")),
        sa.CheckConstraint("max_retries IS NULL OR max_retries >= 0", name=op.f("tasks_max_retries_check")),
        sa.ForeignKeyConstraint(["plan_id"], ["plans.id"], name=op.f("tasks_plan_id_fkey"), ondelete="SET NULL"),
        sa.PrimaryKeyConstraint("id", name=op.f("tasks_pkey")),
        postgresql_with={
            "fillfactor": 70,
            "autovacuum_vacuum_scale_factor": 0.02,
            "autovacuum_vacuum_threshold": 1000,
            "autovacuum_analyze_scale_factor": 0.05,
            "autovacuum_vacuum_cost_delay": 1,
        },
    )
    op.create_index(
        "tasks_cancel_requested",
        "tasks",
        ["id"],
        unique=False,
        postgresql_where=sa.text("status = 'running' AND cancel_requested_at IS NOT NULL"),
    )
    op.create_index("tasks_cancelled", "tasks", ["id"], unique=False, postgresql_where=sa.text("status = 'cancelled'"))
    op.create_index("tasks_failed", "tasks", ["id"], unique=False, postgresql_where=sa.text("status = 'failed'"))
    op.create_index(
        "tasks_held",
        "tasks",
        ["id"],
        unique=False,
        postgresql_where=sa.text("status = 'pending' AND held_at IS NOT NULL"),
    )
    op.create_index(
        "tasks_not_due",
        "tasks",
        ["available_at"],
        unique=False,
        postgresql_where=sa.text("status = 'pending' AND NOT due"),
    )
    op.create_index(
        "tasks_of_plan", "tasks", ["plan_id", "id"], unique=False, postgresql_where=sa.text("plan_id IS NOT NULL")
    )
    op.create_index(
        "tasks_parked",
        "tasks",
        ["status", "agent"],
        unique=False,
        postgresql_where=sa.text("status IN ('blocked', 'waiting')"),
    )
    op.create_index(
        "tasks_plan_name",
        "tasks",
        ["plan_id", "name"],
        unique=True,
        postgresql_where=sa.text("plan_id IS NOT NULL AND name IS NOT NULL AND superseded_at IS NULL"),
    )
    op.create_index(
        "tasks_ready",
        "tasks",
        ["route", sa.literal_column("priority DESC"), "id"],
        unique=False,
        postgresql_where=sa.text("status = 'pending' AND due AND held_at IS NULL AND lost_count = 0"),
    )
    op.create_index(
        "tasks_ready_of_plan",
        "tasks",
        ["plan_id", sa.literal_column("priority DESC"), "id"],
        unique=False,
        postgresql_where=sa.text("status = 'pending' AND due AND held_at IS NULL AND plan_id IS NOT NULL"),
    )
    op.create_index("tasks_running", "tasks", ["id"], unique=False, postgresql_where=sa.text("status = 'running'"))
    op.create_index(
        "tasks_suspect",
        "tasks",
        ["route", sa.literal_column("priority DESC"), "id"],
        unique=False,
        postgresql_where=sa.text("status = 'pending' AND due AND held_at IS NULL AND lost_count > 0"),
    )
    op.create_index(
        "tasks_unique_key",
        "tasks",
        ["unique_key"],
        unique=True,
        postgresql_where=sa.text("unique_key IS NOT NULL AND status IN ('pending', 'running', 'blocked', 'waiting')"),
    )
    op.create_table(
        "checkpoints",
        sa.Column("task_id", sa.BigInteger(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("value", postgresql.JSON(astext_type=sa.Text()), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column(
            "at", postgresql.TIMESTAMP(timezone=True), server_default=sa.text("clock_timestamp()"), nullable=False
        ),
        sa.ForeignKeyConstraint(["task_id"], ["tasks.id"], name=op.f("checkpoints_task_id_fkey"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("task_id", "name", name=op.f("checkpoints_pkey")),
    )
    op.create_table(
        "key_holders",
        sa.Column("task_id", sa.BigInteger(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.CheckConstraint("kind IN ('key', 'directory')", name=op.f("key_holders_kind_check")),
        sa.ForeignKeyConstraint(["task_id"], ["tasks.id"], name=op.f("key_holders_task_id_fkey"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("task_id", "kind", name=op.f("key_holders_pkey")),
    )
    op.create_index(op.f("key_holders_kind_name"), "key_holders", ["kind", "name"], unique=False)
    op.create_table(
        "questions",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=False), nullable=False),
        sa.Column("task_id", sa.BigInteger(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("kind", sa.Text(), server_default="ask", nullable=False),
        sa.Column("question", sa.Text(), nullable=False),
        sa.Column("choices", postgresql.ARRAY(sa.Text()), server_default="{}", nullable=False),
        sa.Column("deadline", postgresql.TIMESTAMP(timezone=True), nullable=True),
        sa.Column("default", sa.Text(), nullable=True),
        sa.Column("yes", sa.Text(), nullable=True),
        sa.Column("no", sa.Text(), nullable=True),
        sa.Column("grants", postgresql.JSONB(none_as_null=True, astext_type=sa.Text()), nullable=True),
        sa.Column("details", postgresql.JSONB(none_as_null=True, astext_type=sa.Text()), nullable=True),
        sa.Column("attempt", sa.Integer(), server_default="0", nullable=False),
        sa.Column(
            "asked_at", postgresql.TIMESTAMP(timezone=True), server_default=sa.text("clock_timestamp()"), nullable=False
        ),
        sa.Column("answered_at", postgresql.TIMESTAMP(timezone=True), nullable=True),
        sa.Column("verdict", sa.Text(), nullable=True),
        sa.Column("answer", sa.Text(), nullable=True),
        sa.Column("actor", sa.Text(), nullable=True),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.CheckConstraint("kind IN ('approval', 'ask', 'permission', 'budget')", name=op.f("questions_kind_check")),
        sa.CheckConstraint(
            "verdict IS NULL OR verdict IN ('approved', 'denied', 'answered', 'expired', 'withdrawn')",
            name=op.f("questions_verdict_check"),
        ),
        sa.CheckConstraint("(answered_at IS NULL) = (verdict IS NULL)", name=op.f("questions_answered_at_check")),
        sa.ForeignKeyConstraint(["task_id"], ["tasks.id"], name=op.f("questions_task_id_fkey"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name=op.f("questions_pkey")),
    )
    op.create_index("questions_of_task", "questions", ["task_id", "id"], unique=False)
    op.create_index(
        "questions_open",
        "questions",
        ["deadline", "asked_at"],
        unique=False,
        postgresql_where=sa.text("answered_at IS NULL"),
    )
    op.create_index(
        "questions_open_name",
        "questions",
        ["task_id", "name"],
        unique=True,
        postgresql_where=sa.text("answered_at IS NULL"),
    )
    op.create_table(
        "runs",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=False), nullable=False),
        sa.Column("task_id", sa.BigInteger(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("cause", sa.Text(), nullable=True),
        sa.Column("message", sa.Text(), nullable=True),
        sa.Column("exit_code", sa.Integer(), nullable=True),
        sa.Column("signal", sa.Integer(), nullable=True),
        sa.Column("worker", sa.Text(), nullable=True),
        sa.Column("worker_id", sa.Uuid(), nullable=True),
        sa.Column("host", sa.Text(), nullable=True),
        sa.Column("started_at", postgresql.TIMESTAMP(timezone=True), nullable=False),
        sa.Column("finished_at", postgresql.TIMESTAMP(timezone=True), nullable=False),
        sa.Column(
            "recorded_at",
            postgresql.TIMESTAMP(timezone=True),
            server_default=sa.text("clock_timestamp()"),
            nullable=False,
        ),
        sa.Column(
            "duration_seconds",
            sa.Double(),
            sa.Computed("extract(epoch FROM finished_at - started_at)::double precision", persisted=True),
            nullable=False,
        ),
        sa.Column("error_class", sa.Text(), sa.Computed("nullif(status, 'done')", persisted=True), nullable=True),
        sa.Column("result", postgresql.JSON(none_as_null=True, astext_type=sa.Text()), nullable=True),
        sa.Column("late", postgresql.JSON(none_as_null=True, astext_type=sa.Text()), nullable=True),
        sa.Column("input_tokens", sa.BigInteger(), nullable=True),
        sa.Column("output_tokens", sa.BigInteger(), nullable=True),
        sa.Column("total_tokens", sa.BigInteger(), nullable=True),
        sa.Column("turns", sa.Integer(), nullable=True),
        sa.Column("model", sa.Text(), nullable=True),
        sa.Column("cost_usd", sa.Double(), nullable=True),
        sa.Column("cost_source", sa.Text(), nullable=True),
        sa.Column("counter", sa.Text(), nullable=True),
        sa.Column("usage_complete", sa.Boolean(), nullable=True),
        sa.Column("session", sa.Text(), nullable=True),
        sa.Column("transcript_bytes", sa.BigInteger(), nullable=True),
        sa.Column("transcript_dropped_bytes", sa.BigInteger(), nullable=True),
        sa.Column("transcript_replaced", sa.Boolean(), nullable=True),
        sa.Column("notes", postgresql.JSONB(none_as_null=True, astext_type=sa.Text()), nullable=True),
        sa.Column("workspace", postgresql.JSONB(none_as_null=True, astext_type=sa.Text()), nullable=True),
        sa.CheckConstraint(
            "status IN ('done', 'transient', 'rate_limited', 'unauthenticated', 'permanent', 'timed_out', 'stalled', 'over_budget', 'suspended', 'cancelled', 'interrupted', 'lost')",
            name=op.f("runs_status_check"),
        ),
        sa.CheckConstraint("attempt > 0", name=op.f("runs_attempt_check")),
        sa.CheckConstraint("finished_at >= started_at", name=op.f("runs_finished_at_check")),
        sa.ForeignKeyConstraint(["task_id"], ["tasks.id"], name=op.f("runs_task_id_fkey"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name=op.f("runs_pkey")),
        sa.UniqueConstraint("task_id", "attempt", name=op.f("runs_task_id_attempt_key")),
        postgresql_with={"autovacuum_analyze_scale_factor": 0.05, "autovacuum_vacuum_insert_scale_factor": 0.1},
    )
    op.create_table(
        "task_dependencies",
        sa.Column("task_id", sa.BigInteger(), nullable=False),
        sa.Column("depends_on", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(
            ["depends_on"], ["tasks.id"], name=op.f("task_dependencies_depends_on_fkey"), ondelete="CASCADE"
        ),
        sa.ForeignKeyConstraint(
            ["task_id"], ["tasks.id"], name=op.f("task_dependencies_task_id_fkey"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("task_id", "depends_on", name=op.f("task_dependencies_pkey")),
    )
    op.create_index(op.f("task_dependencies_depends_on"), "task_dependencies", ["depends_on"], unique=False)
    # ### end Alembic commands ###


def downgrade() -> None:
    op.drop_index(op.f("task_dependencies_depends_on"), table_name="task_dependencies")
    op.drop_table("task_dependencies")
    op.drop_table("runs")
    op.drop_index("questions_open_name", table_name="questions", postgresql_where=sa.text("answered_at IS NULL"))
    op.drop_index("questions_open", table_name="questions", postgresql_where=sa.text("answered_at IS NULL"))
    op.drop_index("questions_of_task", table_name="questions")
    op.drop_table("questions")
    op.drop_index(op.f("key_holders_kind_name"), table_name="key_holders")
    op.drop_table("key_holders")
    op.drop_table("checkpoints")
    op.drop_index(
        "tasks_unique_key",
        table_name="tasks",
        postgresql_where=sa.text("unique_key IS NOT NULL AND status IN ('pending', 'running', 'blocked', 'waiting')"),
    )
    op.drop_index(
        "tasks_suspect",
        table_name="tasks",
        postgresql_where=sa.text("status = 'pending' AND due AND held_at IS NULL AND lost_count > 0"),
    )
    op.drop_index("tasks_running", table_name="tasks", postgresql_where=sa.text("status = 'running'"))
    op.drop_index(
        "tasks_ready_of_plan",
        table_name="tasks",
        postgresql_where=sa.text("status = 'pending' AND due AND held_at IS NULL AND plan_id IS NOT NULL"),
    )
    op.drop_index(
        "tasks_ready",
        table_name="tasks",
        postgresql_where=sa.text("status = 'pending' AND due AND held_at IS NULL AND lost_count = 0"),
    )
    op.drop_index(
        "tasks_plan_name",
        table_name="tasks",
        postgresql_where=sa.text("plan_id IS NOT NULL AND name IS NOT NULL AND superseded_at IS NULL"),
    )
    op.drop_index("tasks_parked", table_name="tasks", postgresql_where=sa.text("status IN ('blocked', 'waiting')"))
    op.drop_index("tasks_of_plan", table_name="tasks", postgresql_where=sa.text("plan_id IS NOT NULL"))
    op.drop_index("tasks_not_due", table_name="tasks", postgresql_where=sa.text("status = 'pending' AND NOT due"))
    op.drop_index(
        "tasks_held", table_name="tasks", postgresql_where=sa.text("status = 'pending' AND held_at IS NOT NULL")
    )
    op.drop_index("tasks_failed", table_name="tasks", postgresql_where=sa.text("status = 'failed'"))
    op.drop_index("tasks_cancelled", table_name="tasks", postgresql_where=sa.text("status = 'cancelled'"))
    op.drop_index(
        "tasks_cancel_requested",
        table_name="tasks",
        postgresql_where=sa.text("status = 'running' AND cancel_requested_at IS NOT NULL"),
    )
    op.drop_table("tasks")
    op.drop_index(
        "alert_deliveries_open",
        table_name="alert_deliveries",
        postgresql_where=sa.text("ended_told_at IS NULL AND gave_up_at IS NULL"),
    )
    op.drop_table("alert_deliveries")
    op.drop_index(
        "workers_live", table_name="workers", postgresql_where=sa.text("stopped_at IS NULL AND dead_at IS NULL")
    )
    op.drop_table("workers")
    op.drop_table("run_events")
    op.drop_table("plans")
    op.drop_table("minutes")
    op.drop_table("concurrency_limits")
    op.drop_table("breakers")
    op.drop_index(op.f("audit_task_id"), table_name="audit")
    op.drop_table("audit")
    op.drop_index("alerts_open", table_name="alerts", postgresql_where=sa.text("ended_at IS NULL"))
    op.drop_index("alerts_ended", table_name="alerts", postgresql_where=sa.text("ended_at IS NOT NULL"))
    op.drop_table("alerts")
    op.drop_table("alert_looks")
    op.drop_table("agents")
    # ### end Alembic commands ###
