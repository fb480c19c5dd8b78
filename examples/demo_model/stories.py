"""Small stories with a hero, a friend, a place, a plot and an ending."""

from __future__ import annotations

import random
from dataclasses import dataclass

from words import (
    ADJECTIVES,
    ANIMALS,
    BOYS,
    COLORS,
    FOODS,
    GIRLS,
    HOBBIES,
    OBJECTS,
    PEOPLE,
    PLACES,
    article,
    expand,
    invented_name,
    pick,
)


@dataclass(frozen=True)
class Story:
    """A complete story, and the facts about which a question can ask."""

    text: str
    name: str
    kind: str
    place: str
    friend: str
    friend_kind: str
    thing: str
    color: str
    hobby: str


OPENINGS = [
    "Once upon a time, there was {a_kind} named {name}. {He} lived {place}[.| with {his} family.]",
    "Once upon a time, {a_adj_kind} named {name} lived {place}.",
    "Once upon a time, {place}, there lived {a_adj_kind}. {His} name was {name}.",
    "[Long ago|Many years ago], {a_adj_kind} named {name} lived {place}.",
    "{name} was {a_adj_kind} who lived {place}.",
    "One [sunny|rainy|cold|warm|windy] [morning|day|evening], {a_kind} named {name} woke up early. {He} lived {place}.",
    "There was once {a_adj_kind} called {name}, and {he} lived {place}.",
]
HABITS = [
    "{name} loved to {hobby}[.| every day.| with {friend} the {fkind}.]",
    "Every [morning|evening], {name} liked to {hobby}.",
    "{He} was [always|often] {adj2}, and {he} loved to {hobby}.",
    "{name} had {a_color_thing} and loved to {hobby}.",
]
PLOTS = [
    # lost and found
    "[One day|That day|Then], {name} lost {his} {color} {thing}. {He} looked [under the "
    'bed|behind the door|in the garden], but it was not there. "[Oh no|Oh dear]! Where is my '
    '{thing}?" {he} [cried|said]. {Friend} the {fkind} came to help. They looked together '
    "and found the {thing} [under a leaf|in the tall grass|behind a rock|inside an old "
    'boot]. "Thank you, {friend}!" said {name}.',
    # found treasure
    "[One day|One afternoon], {name} found {a_color_thing} [on the road|in the sand|under a "
    'bush|near a well]. It [shone in the sun|was very old|looked like magic]. "[Whose '
    '{thing} is this?|Who lost this {thing}?]" {he} asked. {A_fkind} named {friend} said, '
    '"It is mine! I [looked for it all day|missed it so much]." {name} gave it back, and '
    "{friend} gave {him} some {food}.",
    # storm
    "[One night|One day], a [big|loud|dark] storm came. The [wind blew|rain fell|thunder "
    "roared] and {name} was [scared|afraid]. {He} heard a knock on the door. It was "
    '{friend}, {a_fkind}. "May I come in?" asked {friend}. "Of course," said {name}. They '
    "ate [warm|hot|fresh] {food} and [told stories|sang songs|played games] until the storm "
    "was over.",
    # sharing
    "[One day|At noon], {name} made some {food}. It smelled [very good|wonderful]. {Friend} "
    'the {fkind} came by and was [very hungry|cold and hungry]. "[Can I have some|May I try '
    'it]?" asked {friend}. At first {name} wanted to keep it all. Then {he} [smiled|thought '
    'about it] and said, "Yes, we can share." They sat [by the fire|on a bench|in the sun] '
    "and ate together.",
    # race
    '[One day|In the spring], there was a [big|great] race. {Friend} the {fkind} said, "I am '
    '[much faster|stronger] than you." {name} was [not sure|a little afraid], but {he} '
    "wanted to try. They ran [up the hill|around the lake|over the bridge]. {Friend} fell "
    "[down|into the mud], and {name} stopped to help. They [crossed the line|finished] "
    "together, and everyone cheered.",
    # learning
    "[One day|This year], {name} wanted to learn how to [fly a kite|ride a bike|swim|play "
    "the flute|bake a cake]. It was [hard|not easy]. {He} tried once, and {he} fell. {He} "
    'tried [again|two times more], and it did not work. "I can not do it," {he} said. "Do '
    'not give up," said {friend} the {fkind}. "[I will help you|Try one more time]." {name} '
    "tried again, and this time it worked!",
    # journey
    "[One day|One morning], {name} took {his} {thing} and went [to the mountains|across the "
    'sea|into the dark woods]. On the way, {he} met {a_fkind} named {friend}. "Where are you '
    'going?" asked {friend}. "I want to see [the end of the rainbow|the big city|the highest '
    'hill]," said {name}. "[Can I come too|Take me with you]?" So they walked [all day|for '
    "three days] and saw many [wonderful|strange|beautiful] things.",
    # hurt friend
    '[One day|On the way home], {name} heard a [small|sad] voice. "Help! Help!" It was '
    "{a_fkind} named {friend}. {Friend} had a [broken leg|hurt foot] and could not walk. "
    "{name} was [strong|careful], so {he} carried {friend} home and gave {him2} some {food}. "
    'After [a week|a few days], {friend} [could walk|was well] again. "You saved me," said '
    "{friend}.",
    # mystery
    "[One night|At night], {name} heard a strange [noise|sound]. Tap, tap, tap! {He} took "
    '{his} {thing} and went [outside|to the window]. "Who is there?" {he} asked. It was only '
    "{friend} the {fkind}, who [wanted to see the moon|could not sleep]. {name} "
    "[laughed|smiled]. They looked at the [moon|stars] and [counted them|talked] until "
    "morning.",
    # birthday
    "It was {name}'s birthday, but [nobody came|no one said a word]. {name} felt sad and "
    '[sat alone|walked to the lake]. Then {friend} the {fkind} called, "Surprise!" All the '
    '[friends|neighbors] were there with {food}. {Friend} gave {name} {a_color_thing}. "This '
    'is the best day ever," said {name}.',
    # seed
    '[One day|In the spring], {name} got a tiny seed from {friend} the {fkind}. "[Plant it '
    'and wait|Take good care of it]," said {friend}. {name} gave it water every day. [For a '
    "week|For a long time], nothing happened. Then [one morning|at last] there was a "
    "[tall|green|golden] [flower|tree] [as high as the house|with a {color} {thing} on it]. "
    '"[Look|Come and look], {friend}!" {he} [called|shouted].',
    # argument
    "[One day|After lunch], {name} and {friend} the {fkind} both wanted the {color} {thing}. "
    '"It is mine!" said {name}. "No, it is mine!" said {friend}. They [pulled and '
    'pulled|shouted], and the {thing} broke. They were both [sad|sorry]. "[I am sorry|Let us '
    'fix it]," said {name}. They worked together, and soon the {thing} was [as good as '
    "new|even better than before].",
    # wish
    '[One night|One evening], {name} saw a falling star. "I wish for [{a_color_thing}|a new '
    'friend|some {food}]," {he} said. The next morning there was [a letter|a box] at the '
    'door. [Inside was a map|It came from {friend} the {fkind}]. "[Come and visit me|Meet me '
    'at the old bridge]," it said. {name} [ran|went] there, and {friend} was waiting with [a '
    "big smile|some {food}].",
    # lost in woods
    "[One day|One afternoon], {name} walked too far and [got lost|could not find the way "
    'home]. It was [getting dark|very cold]. "[Do not be afraid|Do not cry]," said a voice. '
    'It was {friend}, {a_fkind} with {a_color_thing}. "[I know the way|Follow me]." They '
    "walked [over the hill|through the woods|along the river] until they saw a light in the "
    "window.",
    # new in town
    "[One day|Last week], {a_fkind} named {friend} came to live next door. {Friend} did not "
    '[talk much|know anyone]. {name} took some {food} and knocked. "Hello, I am {name}. [Do '
    'you want to play|Would you like some {food}]?" {he} asked. {Friend} [smiled|opened the '
    'door slowly]. "Yes, please," {friend} said. They [played with the {thing}|talked about '
    "many things] until the sun went down.",
]
ENDINGS = [
    "From that day on, they were [best|good] friends.",
    "{name} was very [happy|proud|glad] and [slept well that night|went home with a smile].",
    "{name} learned that [it is good to share|friends help each other|it is good to be kind|you should never give up].",
    "And they lived happily ever after.",
    "[In the evening|Then], {name} and {friend} went home and had {food} for dinner.",
    "[Everyone|The whole village] was happy, and {name} [danced|laughed|sang] all night.",
]


def make_story(rng: random.Random, kind: str | None = None, name: str | None = None) -> Story:
    """Return a random story. ``kind`` and ``name`` select the hero's kind and name, if given."""
    female = rng.random() < 0.5
    if kind == "queen" or name in GIRLS:
        female = True
    if kind == "king" or name in BOYS:
        female = False
    if kind is None:
        options = ["girl" if female else "boy"] * 4 + ANIMALS + PEOPLE
        kind = pick(rng, [option for option in options if option != ("king" if female else "queen")])
    name = name or (invented_name(rng) if rng.random() < 0.25 else pick(rng, GIRLS if female else BOYS))
    friend_female = rng.random() < 0.5
    friend = pick(rng, [other for other in (GIRLS if friend_female else BOYS) if other != name])
    friend_kind = pick(rng, [animal for animal in ANIMALS if animal != kind])
    color, thing, hobby, place = pick(rng, COLORS), pick(rng, OBJECTS), pick(rng, HOBBIES), pick(rng, PLACES)
    he, him, his = ("she", "her", "her") if female else ("he", "him", "his")
    slots = {
        "name": name, "kind": kind, "a_kind": article(kind), "friend": friend, "Friend": friend, "fkind": friend_kind,
        "a_fkind": article(friend_kind), "A_fkind": article(friend_kind).capitalize(), "place": place,
        "he": he, "He": he.capitalize(), "him": him, "his": his, "His": his.capitalize(),
        "him2": "her" if friend_female else "him", "color": color, "thing": thing,
        "a_color_thing": article(f"{color} {thing}"), "a_adj_kind": article(f"{pick(rng, ADJECTIVES)} {kind}"),
        "adj2": pick(rng, ["busy", "happy", "polite", "hungry", "cheerful"]), "hobby": hobby, "food": pick(rng, FOODS),
    }  # fmt: skip
    # The first three openings are well known, so they are used more often than the others.
    opening = pick(rng, OPENINGS[:3]) if rng.random() < 0.5 else pick(rng, OPENINGS)
    parts = [opening, pick(rng, HABITS), pick(rng, PLOTS)]
    if rng.random() < 0.1:
        parts.pop(1)
    parts.append(pick(rng, ENDINGS))
    if rng.random() < 0.3:
        parts.append("The end.")
    text = " ".join(expand(part, rng, slots) for part in parts)
    return Story(text, name, kind, place, friend, friend_kind, thing, color, hobby)


def story_question(rng: random.Random, story: Story) -> tuple[str, str]:
    """Return a question about ``story`` and its answer, both supported by the text of the story."""
    options = [
        (f"Where did {story.name} live?", f"{story.name} lived {story.place}."),
        (f"Who was {story.name}?", f"{story.name} was {article(story.kind)}."),
        (f"What was the name of the {story.kind}?", f"The name of the {story.kind} was {story.name}."),
    ]
    if f"to {story.hobby}" in story.text:
        options.append((f"What did {story.name} love to do?", f"{story.name} loved to {story.hobby}."))
    if story.friend in story.text:
        options.append((f"Who was {story.friend}?", f"{story.friend} was {article(story.friend_kind)}."))
        options.append(("What was the name of the friend?", f"The name of the friend was {story.friend}."))
    return pick(rng, options)
