"""Words of short stories: people, places, things, and what there is to learn or to fear."""

from typing import NamedTuple


class Person(NamedTuple):
    """Someone with a name, and the words that stand for it."""

    name: str
    kind: str
    he: str
    him: str
    his: str

    def __str__(self) -> str:
        return self.name

    @property
    def He(self) -> str:
        return self.he.capitalize()

    @property
    def His(self) -> str:
        return self.his.capitalize()


class Spot(NamedTuple):
    """A place to go to and to be at."""

    to: str
    at: str


class Fear(NamedTuple):
    """Something that looks worse than it is, and how it is overcome."""

    of: str
    step: str
    truth: str


class Skill(NamedTuple):
    """Something that takes practice."""

    do: str
    did: str
    trouble: str


def _she(name: str, kind: str) -> Person:
    return Person(name, kind, "she", "her", "her")


def _he(name: str, kind: str) -> Person:
    return Person(name, kind, "he", "him", "his")


HEROES = (
    _she("Lily", "girl"),
    _she("Mia", "girl"),
    _she("Anna", "girl"),
    _she("Sue", "girl"),
    _she("Rosie", "rabbit"),
    _she("Daisy", "duck"),
    _she("Molly", "mouse"),
    _she("Bella", "bear"),
    _he("Tom", "boy"),
    _he("Ben", "boy"),
    _he("Sam", "boy"),
    _he("Leo", "boy"),
    _he("Max", "bear"),
    _he("Pip", "mouse"),
    _he("Finn", "fox"),
    _he("Toby", "rabbit"),
)
ELDERS = (
    _she("Mom", "mother"),
    _he("Dad", "father"),
    _she("Grandma", "grandmother"),
    _he("Grandpa", "grandfather"),
)
PLACES = (
    Spot("to the park", "in the park"),
    Spot("to the beach", "at the beach"),
    Spot("into the garden", "in the garden"),
    Spot("into the forest", "in the forest"),
    Spot("to the river", "by the river"),
    Spot("to the farm", "on the farm"),
    Spot("up the hill", "on the hill"),
    Spot("to the lake", "by the lake"),
)
PETS = ("bird", "cat", "puppy", "frog", "squirrel", "turtle")
TOYS = ("ball", "kite", "boat", "doll", "drum", "truck", "hat", "book")
COLORS = ("red", "blue", "green", "yellow", "pink", "purple")
TRAITS = ("little", "kind", "happy", "curious", "brave", "shy", "clever", "gentle")
HOBBIES = (
    "play outside",
    "sing songs",
    "draw pictures",
    "run and jump",
    "count the clouds",
    "help at home",
    "look for shells",
    "climb trees",
)
FOODS = ("cake", "soup", "bread", "pie", "jam")
WEATHERS = ("sunny", "windy", "warm", "cold", "bright", "quiet")
TIMES = ("day", "morning", "afternoon")
SPOTS = (
    "under a big tree",
    "behind a rock",
    "in the tall grass",
    "next to a bench",
    "under a bush",
    "near the gate",
)
PLANTS = ("a flower", "a tomato", "a pumpkin", "a bean", "a rose")
FRAGILE = ("cup", "plate", "lamp", "clock", "bowl", "window")
LOADS = ("bag", "box", "basket", "bucket")
SKILLS = (
    Skill("ride a bike", "rode the bike", "The bike fell over again and again."),
    Skill("swim", "swam across the pool", "The water was cold and deep."),
    Skill("skate", "skated in a big circle", "The skates went the wrong way."),
    Skill("play the flute", "played a whole song", "The flute made a funny noise."),
    Skill("tie two shoes", "tied both shoes", "The knot came loose every time."),
    Skill("jump rope", "jumped ten times", "The rope hit the ground too soon."),
)
FEARS = (
    Fear("the dark", "turned on a small light", "It was only a coat on a chair"),
    Fear("the noise in the night", "opened the door", "It was only the wind"),
    Fear("the tall slide", "climbed up one step at a time", "It was only a fast ride"),
    Fear("the deep water", "put one foot in", "It was only a little cold"),
    Fear("the big dog", "held out a hand", "It only wanted to play"),
    Fear("the old house", "looked in the window", "It was only a home for cats"),
)
