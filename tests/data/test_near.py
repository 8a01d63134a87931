"""Near-duplicates are those that comparing all pairs finds."""

import random

from megatron_fleet.data.near import THRESHOLD, jaccard, near_duplicates, similar, triples, words
from megatron_fleet.data.task import Task


def changed(text, number, rng):
    parts = text.split()
    for place in rng.sample(range(len(parts)), number):
        parts[place] = f"new{rng.randrange(10**6)}"
    return " ".join(parts)


def by_all_pairs(texts):
    """Connected groups by the word triples themselves, unhashed."""

    def exact(text):
        of = words(text)
        return {of[i : i + 3] for i in range(max(len(of) - 2, 1))}

    sets, groups = [exact(text) for text in texts], [{i} for i in range(len(texts))]
    for i, a in enumerate(sets):
        for j in range(i):
            if len(a & sets[j]) / len(a | sets[j]) >= THRESHOLD:
                one, other = (next(g for g in groups if k in g) for k in (i, j))
                if one is not other:
                    one |= other
                    groups.remove(other)
    return sorted(sorted(group) for group in groups if len(group) > 1)


def test_groups_equal_those_of_all_pairs():
    rng = random.Random(3)
    vocabulary = [f"word{i}" for i in range(400)]
    texts = [" ".join(rng.choices(vocabulary, k=rng.randint(15, 60))) for _ in range(80)]
    texts += [changed(rng.choice(texts), rng.randint(0, 4), rng) for _ in range(120)]
    expected = by_all_pairs(texts)
    assert len(expected) > 20
    assert sorted(similar(texts)) == expected


def test_case_and_punctuation_do_not_count_but_words_and_numbers_do():
    assert similar(["Pay the bill, now!", "pay  the BILL now", "Pay the bill of 3 now", "Pay the bill of 4 now"]) == [
        [0, 1]
    ]


def test_short_and_empty_texts():
    assert similar([]) == []
    assert similar(["a", "a b", "a", "!", "?"]) == [[0, 2], [3, 4]]
    assert jaccard(triples(("a",)), triples(("b",))) == 0


def test_many_copies_of_one_text_are_one_group():
    assert similar(["close the ticket of Ana"] * 3000) == [list(range(3000))]


def test_only_tasks_on_the_same_data_are_compared_and_large_groups_come_first():
    def task(key, env, data=None):
        return Task(key, "the same prompt for all of them", env, "v", data_key=data)

    tasks = [
        task("a1", "a"),
        task("b1", "b"),
        task("a2", "a"),
        task("a3", "a", "other"),
        task("b2", "b"),
        task("b3", "b"),
    ]
    assert [[t.key for t in group] for group in near_duplicates(tasks)] == [["b1", "b2", "b3"], ["a1", "a2"]]
