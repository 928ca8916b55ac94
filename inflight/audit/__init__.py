"""The audit: replays a run's rollouts under the versions that their tags claim and compares every log-probability.

segments.py reads from the tags which forward passes they claim, replay.py runs them through plain transformers,
alternatives.py tells other stories, evidence.py says which one fits, report.py what came out. See docs/audit.md.
"""

from inflight.audit.command import main, run
from inflight.audit.replay import AuditError
from inflight.audit.report import AuditReport

__all__ = ["AuditError", "AuditReport", "main", "run"]
