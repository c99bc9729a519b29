"""Writes seeded fairy tales: short coherent stories from a grammar.

They make "Once upon a time" a prompt that the model has met. Every tale keeps its hero, helper,
place and treasure from the first sentence to the last; the words around them vary.
"""

import random
from collections.abc import Mapping


def _choices(text: str) -> tuple[str, ...]:
    return tuple(text.split("|"))


HEROES = {
    "she": (
        "girl princess queen goose hen cat seamstress shepherdess milkmaid duckling dove weaver",
        "Anna Clara Rose Lily Emma Mary Ella Ruth Nora Alice Grace Lucy Marian Agnes Dora Hazel Ivy Martha Sophie Helen",
    ),
    "he": (
        "boy prince king fox bear tailor woodcutter miller fisherman rabbit mouse hedgehog shepherd soldier wolf",
        "Tom Jack Peter Hugo Oliver Henry Felix Martin Simon Robin Arthur Walter Edmund Otto Giles Rufus Ned Bruno Oscar Hans",
    ),
}
WORDS: Mapping[str, tuple[str, ...]] = {
    "trait": _choices(
        "little|poor|clever|brave|lonely|kind|old|young|gentle|curious|lazy|proud|cheerful|patient"
    ),
    "place": (
        "a small village by the sea",
        "a cottage at the edge of a dark forest",
        "a stone house near the river",
        "a green valley between two mountains",
        "a castle on a high hill",
        "a mill beside a clear stream",
        "an old town with a crooked tower",
        "a hut under a tall oak tree",
        "a quiet farm at the end of a long road",
        "an island where the wind never slept",
    ),
    "treasure": _choices(
        "golden ring|silver key|red lantern|little wooden box|magic flute|blue stone|glass bell|old map|"
        "white feather|copper cup|silk scarf|bag of seeds|small brass clock|ivory comb|book of songs"
    ),
    "helper": _choices(
        "an owl|an old woman|a grey horse|a tiny frog|a blackbird|an old sailor|a wise turtle|"
        "a white deer|a beggar|a travelling merchant|a small brown dog|a swan|a blind musician"
    ),
    "villain": _choices(
        "a giant|a dragon|a cruel witch|a greedy king|a troll|a thief|a sly wizard|a jealous neighbour|an ogre"
    ),
    "season": ("spring", "summer", "autumn", "winter"),
    "weather": (
        "the rain fell softly on the roof",
        "the snow lay deep upon the fields",
        "the sun shone bright and warm",
        "a cold wind blew from the north",
        "the moon hung like a lamp above the trees",
        "a thick fog covered the road",
        "the stars were shining one by one",
    ),
    "moral": (
        "a kind word is worth more than gold",
        "those who share their bread are never hungry for long",
        "it is better to be brave once than to be afraid for ever",
        "a true friend is the greatest treasure of all",
        "patience opens every door",
        "even the smallest creature may do a great thing",
        "what is given freely always comes back",
        "a promise must be kept, whatever it costs",
    ),
    "food": (
        "a piece of bread",
        "a red apple",
        "a bowl of soup",
        "some cheese and honey",
        "a handful of berries",
    ),
    "path": (
        "over the hills",
        "through the forest",
        "along the river",
        "across the wide plain",
        "down to the sea",
    ),
    "number": ("two", "three", "four", "five", "six", "seven"),
}
OPENINGS = (
    "Once upon a time there was a {trait} {kind} named {name}, who lived in {place}.",
    "Once upon a time, in {place}, there lived a {trait} {kind} whose name was {name}.",
    "Once upon a time a {trait} {kind} called {name} lived in {place}.",
    "Once upon a time there lived a {trait} {kind} in {place}, and everybody called {them} {name}.",
    "Long ago, in {place}, there lived a {trait} {kind} named {name}.",
)
HABITS = (
    "Every morning {name} went out to fetch water, and every evening {they} sat by the fire and listened to the wind.",
    "{Name} had no brothers and no sisters, but {they} had a {treasure}, and {they} loved it more than anything in the world.",
    "All day long {they} worked, and at night {they} dreamed of going far away {path}.",
    "The neighbours liked {them} very much, for {they} always had a kind word for everyone.",
    "{Name} was so poor that {they} had nothing but a {treasure} which {their} grandmother had left {them}.",
    "People came from far and near to see the {treasure} that hung above {their} door.",
)
TROUBLES = {
    "lost": (
        "One day in {season}, when {weather}, {name} found that the {treasure} was gone.",
        "But one night, while {weather}, the {treasure} disappeared, and no one could say where it had gone.",
    ),
    "stolen": (
        "One day {villain} came to the door and took the {treasure} away.",
        "One night in {season} {villain} crept into the house and stole the {treasure} while {name} was asleep.",
    ),
    "quest": (
        "One day in {season} a messenger came and said that whoever found the {treasure} should have half the kingdom.",
        'One morning, when {weather}, {name} heard a voice saying, "Go {path}, and there you will find a {treasure}."',
    ),
}
DEPARTURES = (
    "{Name} was very sad, and wept for a long time; but at last {they} dried {their} eyes, put {food} in {their} pocket, "
    "and set out {path}.",
    '"I must go and find it," said {name}, "even if I have to walk to the end of the world." So {they} took {food} '
    "and went {path}.",
    "So {name} said good-bye to {their} friends and walked {path} for {number} days and {number} nights.",
)
MEETINGS = (
    'On the way {they} met {helper}. "Where are you going, {name}?" asked {the_helper}. "I am looking for a {treasure}," '
    'said {name}. "Give me {food}," said {the_helper}, "and I will help you."',
    'Before long {they} came upon {helper} sitting by the road. "Good day," said {the_helper}. "I have not eaten for '
    '{number} days. Will you give me {food}?"',
    "When {they} had gone a little way, {they} heard someone crying, and there was {helper} caught under a fallen tree. "
    '"Help me, {name}, and you will not be sorry," said {the_helper}.',
)
KINDNESSES = (
    "{Name} had very little, but {they} gave gladly what {they} had, and {the_helper} thanked {them} and told {them} the way.",
    '{Name} did so at once. "You have a good heart," said {the_helper}. "Now listen to me, and do not be afraid."',
    '"With all my heart," said {name}, and {they} did what {the_helper} asked.',
)
TRIALS = {
    "lost": (
        "Then {the_helper} led {them} {path} to a deep well, and at the bottom of the well the {treasure} was shining.",
        "They searched together for {number} days, and on the last day, when {weather}, they saw the {treasure} lying in "
        "the grass.",
    ),
    "stolen": (
        "At midnight they came to the house of {the_villain}. {The_villain} was asleep and snoring so loudly that the walls "
        "shook. {Name} crept in on the tips of {their} toes, took the {treasure}, and ran away as fast as {they} could.",
        '"Give me back what is mine!" cried {name}. {The_villain} laughed. But {the_helper} had told {them} a secret word, '
        "and when {name} spoke it, {the_villain} turned into a stone.",
    ),
    "quest": (
        "They came to a door with {number} locks. {Name} knocked {number} times, and the door opened, and there upon a table "
        "lay the {treasure}.",
        "At the top of the mountain stood a tree, and in the tree was a nest, and in the nest was the {treasure}.",
    ),
}
ENDINGS = (
    "{Name} went home with the {treasure}, and {the_helper} came too, and they lived happily together for many years.",
    "So {name} came home again. There was a great feast, and everybody danced until the morning, and {the_helper} sat at the "
    "head of the table.",
    "And {name} took the {treasure} home, and from that day {they} was never lonely again.",
    "When {name} came back, the whole village was glad, and they all lived happily ever after.",
)
MORALS = (
    "And {name} never forgot that {moral}.",
    "For {moral}.",
    '"Remember," said {the_helper}, "{moral}."',
    "",
)


def _definite(noun: str) -> str:
    return "the " + noun.split(" ", 1)[1]


def tale(rng: random.Random) -> str:
    """Returns one story in four paragraphs."""
    pronoun = rng.choice(sorted(HEROES))
    kinds, names = HEROES[pronoun]
    name = rng.choice(names.split())
    helper = rng.choice(WORDS["helper"])
    villain = rng.choice(WORDS["villain"])
    fixed = {
        "name": name,
        "Name": name,
        "kind": rng.choice(kinds.split()),
        "they": pronoun,
        "them": {"she": "her", "he": "him"}[pronoun],
        "their": {"she": "her", "he": "his"}[pronoun],
        "treasure": rng.choice(WORDS["treasure"]),
        "helper": helper,
        "the_helper": _definite(helper),
        "villain": villain,
        "the_villain": _definite(villain),
        "The_villain": _definite(villain).capitalize(),
    }
    plot = rng.choice(sorted(TROUBLES))

    def say(choices: tuple[str, ...]) -> str:
        varied = {key: rng.choice(values) for key, values in WORDS.items() if key not in fixed}
        text = rng.choice(choices).format(**fixed, **varied)
        return text[:1].upper() + text[1:]

    paragraphs = [
        f"{say(OPENINGS)} {say(HABITS)}",
        f"{say(TROUBLES[plot])} {say(DEPARTURES)}",
        f"{say(MEETINGS)} {say(KINDNESSES)}",
        f"{say(TRIALS[plot])} {say(ENDINGS)} {say(MORALS)}".rstrip(),
    ]
    return "\n\n".join(paragraphs)
