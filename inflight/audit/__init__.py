"""The audit: replays a run's rollouts under the versions that their tags claim and compares every log-probability.

segments.py derives the claimed forward passes from the tags, replay.py runs them through plain transformers,
alternatives.py defines fault hypotheses, evidence.py decides which fits, report.py has the result. See docs/audit.md.
"""

from inflight.audit.command import main, run
from inflight.audit.replay import AuditError
from inflight.audit.report import AuditReport

__all__ = ["AuditError", "AuditReport", "main", "run"]
