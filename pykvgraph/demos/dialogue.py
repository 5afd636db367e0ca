"""What the embedded dialogue model can talk about: facts, questions about them, and small talk.

Everything is drawn with a random.Random, so that a seed gives a dialogue. training/ uses the same texts.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

DID_NOT_TELL = "You didn't tell me."


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


NAMES = _words(
    "Tom Anna Ben Clara David Emma Frank Grace Henry Ida Jack Karl Lena Max Nora Oscar Paul Rosa Sam Tina "
    "Victor Wanda Alice Bruno Carla Daisy Eric Felix Gina Hugo Iris Jonas Kim Leo Maria Nina Otto Peter Rex "
    "Sara Theo Ursula Vera Walter Bella Luna Milo Ruby"
)
CITIES = _words(
    "Rome Paris London Berlin Madrid Vienna Oslo Athens Dublin Lisbon Prague Warsaw Cairo Delhi Tokyo Sydney "
    "Boston Chicago Denver Moscow Geneva Milan Naples Venice"
)
COUNTRIES = _words(
    "France Italy Spain Germany Poland Norway Sweden Greece Egypt India Japan China Brazil Canada Mexico Peru"
)
JOBS = _words(
    "baker teacher doctor farmer painter singer writer lawyer nurse pilot driver cook tailor plumber dancer "
    "gardener sailor judge waiter barber"
)
COLOURS = _words("red blue green yellow black white brown grey pink purple orange golden")
INSTRUMENTS = _words("piano guitar violin flute drums trumpet harp cello")
AGES = tuple(str(age) for age in range(18, 91))
FAVOURITES = {
    "colour": COLOURS,
    "food": _words("pizza pasta rice soup bread cheese salad fish chicken curry"),
    "drink": _words("tea coffee milk water juice beer wine lemonade"),
    "animal": _words("lion tiger bear wolf fox eagle whale panda zebra owl"),
    "sport": _words("tennis football golf hockey boxing rowing skiing running"),
    "season": _words("spring summer autumn winter"),
    "fruit": _words("apple banana cherry lemon melon peach pear plum grape mango"),
    "month": _words("January February March April May June July August September October November December"),
    "day": _words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday"),
}
NAMED = _words(
    "cat dog horse bird rabbit fish sister brother mother father son daughter friend boss neighbour teacher"
)
COLOURED = _words("car house bike coat door boat")


@dataclass(frozen=True)
class Kind:
    """A kind of fact: how it is told, asked and answered. {v} is the value."""

    values: tuple[str, ...]
    tellings: tuple[str, ...]
    questions: tuple[str, ...]
    answer: str


def _named(what: str) -> Kind:
    return Kind(
        NAMES,
        (
            f"My {what} is called {{v}}.",
            f"I have a {what} called {{v}}.",
            f"The name of my {what} is {{v}}.",
        ),
        (
            f"What is my {what} called?",
            f"What is the name of my {what}?",
            f"Do you remember the name of my {what}?",
        ),
        f"Your {what} is called {{v}}.",
    )


def _favourite(what: str, values: tuple[str, ...]) -> Kind:
    return Kind(
        values,
        (f"My favourite {what} is {{v}}.", f"The {what} I like best is {{v}}."),
        (
            f"What is my favourite {what}?",
            f"Which {what} do I like best?",
            f"Do you remember my favourite {what}?",
        ),
        f"Your favourite {what} is {{v}}.",
    )


def _coloured(what: str) -> Kind:
    return Kind(
        COLOURS,
        (f"My {what} is {{v}}.", f"The colour of my {what} is {{v}}."),
        (f"What colour is my {what}?", f"Do you remember the colour of my {what}?"),
        f"Your {what} is {{v}}.",
    )


KINDS = (
    *map(_named, NAMED),
    *(_favourite(what, values) for what, values in FAVOURITES.items()),
    *map(_coloured, COLOURED),
    Kind(
        NAMES,
        ("My name is {v}.", "I am called {v}."),
        ("What is my name?", "Do you remember my name?"),
        "Your name is {v}.",
    ),
    Kind(
        CITIES,
        ("I live in {v}.", "My home is in {v}."),
        ("Where do I live?", "Do you remember where I live?"),
        "You live in {v}.",
    ),
    Kind(
        CITIES,
        ("I was born in {v}.",),
        ("Where was I born?", "Do you remember where I was born?"),
        "You were born in {v}.",
    ),
    Kind(
        COUNTRIES,
        ("I come from {v}.",),
        ("Where do I come from?", "Do you remember where I come from?"),
        "You come from {v}.",
    ),
    Kind(
        JOBS,
        ("I work as a {v}.", "My job is {v}."),
        ("What is my job?", "What do I work as?"),
        "You work as a {v}.",
    ),
    Kind(
        INSTRUMENTS,
        ("I play the {v}.",),
        ("What do I play?", "Do you remember what I play?"),
        "You play the {v}.",
    ),
    Kind(
        AGES,
        ("I am {v} years old.", "My age is {v}."),
        ("How old am I?", "Do you remember how old I am?"),
        "You are {v} years old.",
    ),
)


@dataclass(frozen=True)
class Fact:
    """Something that the user tells."""

    kind: Kind
    value: str

    def told(self, rng: Random) -> str:
        return rng.choice(self.kind.tellings).format(v=self.value)

    @property
    def answer(self) -> str:
        return self.kind.answer.format(v=self.value)


def draw_facts(rng: Random, n: int) -> list[Fact]:
    """n facts of different kinds."""
    return [Fact(kind, rng.choice(kind.values)) for kind in rng.sample(KINDS, n)]


SYSTEM = ("You are a friendly assistant.", "You are a helpful assistant.", "Answer in short sentences.")
GOOD_TO_KNOW = ("I will remember that.", "Good to know.", "Thank you for telling me.")

PLACES = _words("house garden river city forest school market kitchen road mountain")
THINGS = _words("tree book cup lamp stone letter clock table chair window")
LOOKS = _words("old new small big quiet warm cold bright dark round")
DEEDS = _words("sees likes finds takes wants brings keeps loses")
REMARKS = (
    "The {thing} is {look}.",
    "{person} {deed} the {look} {thing}.",
    "There is a {thing} in the {place}.",
    "The {look} {thing} is near the {place}.",
    "{person} and {person2} go to the {place}.",
    "We go to the {place} with the {thing}.",
    "The weather is {look} today.",
)
HEARD = ("I see.", "That is nice.", "Tell me more.", "That sounds good.")
SMALL_TALK = {
    "Hello.": "Hello. Nice to meet you.",
    "Good morning.": "Good morning to you.",
    "How are you?": "I am fine, thank you.",
    "Thank you.": "You are welcome.",
    "Who are you?": "I am a small model with a short memory.",
    "What can you do?": "I can remember what you tell me.",
    "Can you help me?": "Of course. What do you need?",
    "Do you like music?": "Yes, I like it very much.",
    "It is late.": "Then sleep well.",
    "I am tired.": "You should take a rest.",
    "I am happy today.": "I am glad to hear that.",
    "Tell me something.": "The river is quiet today.",
}


def remark(rng: Random) -> str:
    """A sentence that tells nothing about the user."""
    person, person2 = rng.sample(NAMES, 2)
    return rng.choice(REMARKS).format(
        thing=rng.choice(THINGS),
        look=rng.choice(LOOKS),
        place=rng.choice(PLACES),
        deed=rng.choice(DEEDS),
        person=person,
        person2=person2,
    )


def small_talk(rng: Random) -> tuple[str, str]:
    """What the user says, and what may be answered."""
    if rng.random() < 0.5:
        return rng.choice(list(SMALL_TALK.items()))
    return remark(rng), rng.choice(HEARD)
