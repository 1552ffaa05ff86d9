"""`python -m examples.search_agent.corpus`: writes corpus.txt, a document a line.

Towns, rivers and people are made up, so nobody can know an answer without looking it up.
"""

import random
from collections.abc import Iterator
from typing import NamedTuple

from examples.search_agent.search import CORPUS

TOWNS = 128
PEOPLE = 128
STARTS = (  # noqa: SIM905
    "Bal Ben Bor Cal Cor Dal Dor Fal Fen Gal Gor Hal Hen Kal Kor Lan"
    " Len Lor Mal Mor Nal Nor Pal Per Ral Ren Sal Sor Tal Tor Val Ver"
).split()
ENDS = (  # noqa: SIM905
    "bek bin dan dek den din fas fin gan gas hem kas kin lem lin mas"
    " mek min bas dem tik pas pin ras rik sem sin tas tek tin vas vik"
).split()


class Relation(NamedTuple):
    """How a kind of fact is told, asked and found."""

    document: str
    question: str
    keyword: str
    """A word of the document that tells it from others about the same subject."""


RIVER = Relation("{0} lies on the river {1}.", "On which river does {0} lie?", "river")
FOUNDED = Relation("{0} was founded in {1}.", "When was {0} founded?", "founded")
BORN = Relation("{0} was born in {1}.", "Where was {0} born?", "born")
DIED = Relation("{0} died in {1}.", "When did {0} die?", "died")
RELATIONS = (RIVER, FOUNDED, BORN, DIED)


class Fact(NamedTuple):
    """One document, and the question that it answers."""

    subject: str
    relation: Relation
    answer: str

    @property
    def document(self) -> str:
        return self.relation.document.format(self.subject, self.answer)

    @property
    def question(self) -> str:
        return self.relation.question.format(self.subject)

    @property
    def query(self) -> str:
        """What to search for."""
        return f"{self.relation.keyword} {self.subject}"


def names() -> list[str]:
    """Returns all names, shuffled: the first are those of the corpus."""
    made = [start + end for start in STARTS for end in ENDS]
    random.Random("names").shuffle(made)
    return made


def corpus_facts() -> list[Fact]:
    """Returns the facts of the corpus, two for each town and each person."""
    return list(_facts(names()[: 2 * TOWNS + PEOPLE], random.Random("corpus")))


def other_facts(rng: random.Random) -> list[Fact]:
    """Returns as many facts about towns, rivers and people that the corpus does not mention."""
    rest = names()[2 * TOWNS + PEOPLE :]
    return list(_facts(rng.sample(rest, 2 * TOWNS + PEOPLE), rng))


def _facts(found: list[str], rng: random.Random) -> Iterator[Fact]:
    towns = found[:TOWNS]
    rivers = found[TOWNS : 2 * TOWNS]
    people = found[2 * TOWNS :]
    for town, river in zip(towns, rivers, strict=True):
        yield Fact(town, RIVER, river)
        yield Fact(town, FOUNDED, str(rng.randint(1100, 1899)))
    for person in people:
        yield Fact(person, BORN, rng.choice(towns))
        yield Fact(person, DIED, str(rng.randint(1100, 1899)))


if __name__ == "__main__":
    documents = [fact.document for fact in corpus_facts()]
    random.Random("order").shuffle(documents)
    CORPUS.write_text("".join(document + "\n" for document in documents), encoding="utf-8")
