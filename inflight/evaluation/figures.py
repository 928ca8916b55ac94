"""The figures of an evaluation's answers: means, and pass@k."""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence

from inflight.evaluation.answer import MIXED, Answered

MAX_REASONS = 64


def pass_at(k: int, answers: int, correct: int) -> float:
    """Probability that one of k answers drawn from `answers`, `correct` of which are correct, is correct: the unbiased
    estimator 1 - C(n - c, k) / C(n, k) of Chen et al. 2021, "Evaluating Large Language Models Trained on Code", eq. 1.

    Raises ValueError unless 1 <= k <= answers and 0 <= correct <= answers.
    """
    if not 1 <= k <= answers or not 0 <= correct <= answers:
        raise ValueError(f"pass@{k} of {answers} answers, {correct} of them correct")
    return 1.0 - math.comb(answers - correct, k) / math.comb(answers, k)


def figures(answered: Sequence[Answered], pass_k: Sequence[int], correct_at: float) -> dict[str, float]:
    """`reward`, `reward_stderr`, `pass@k`, `tokens` and `truncated` over the answers that count, and how many they are.

    `reward` is the mean over questions of the mean over a question's answers. `reward_stderr` is its standard error,
    of questions as a sample of more. `pass@k` is the mean over the questions that have k answers at least; absent where
    none has. Without any answer that counts only the counts are given.
    """
    by_question = defaultdict[int, list[Answered]](list)
    for each in answered:
        if not each.failed:
            by_question[each.question].append(each)
    counted = [each for answers in by_question.values() for each in answers]
    found: dict[str, float] = {
        "questions": len({each.question for each in answered}),
        "answers": len(counted),
        "mixed": sum(each.failed == MIXED for each in answered),
        "failed": sum(bool(each.failed) and each.failed != MIXED for each in answered),
    }
    if not counted:
        return found
    means = [statistics.fmean(each.reward for each in answers) for answers in by_question.values()]
    found["reward"] = statistics.fmean(means)
    if len(means) > 1:
        found["reward_stderr"] = statistics.stdev(means) / math.sqrt(len(means))
    for k in pass_k:
        passed = [
            pass_at(k, len(answers), sum(each.reward >= correct_at for each in answers))
            for answers in by_question.values()
            if len(answers) >= k
        ]
        if passed:
            found[f"pass@{k}"] = statistics.fmean(passed)
    found["tokens"] = statistics.fmean(each.tokens for each in counted)
    found["truncated"] = statistics.fmean(each.truncated for each in counted)
    return found


def reasons(answered: Sequence[Answered]) -> dict[str, int]:
    """How many answers do not count, by reason; the rarest of very many reasons are one."""
    found = Counter(each.failed[:128] for each in answered if each.failed)
    common = dict(found.most_common(MAX_REASONS))
    rest = found.total() - sum(common.values())
    return common | ({"other": common.get("other", 0) + rest} if rest else {})
