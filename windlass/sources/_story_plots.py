"""Plots of short stories: the beats of each, and the ways to say them."""


class Aside(tuple[str, ...]):
    """A beat that a story can do without."""


def _aside(*ways: str) -> Aside:
    return Aside(ways)


# A beat is one step of a story, said in one of several ways. {a} is the hero and {b} the friend,
# who has no name in a story before the beat that brings them in.
OPENING = (
    (
        "Once upon a time, there was a {trait} {a.kind} named {a}.",
        "There was once a {trait} {a.kind} named {a}.",
        "{a} was a {trait} {a.kind}.",
        "Long ago, there lived a {trait} {a.kind} named {a}.",
    ),
    (
        "{a.He} loved to {hobby}.",
        "{a.He} liked to {hobby} every day.",
        "Most of all, {a.he} liked to {hobby}.",
        "All day long, {a.he} liked to {hobby}.",
    ),
)
ENDING = (
    "They were both very happy.",
    "It was the best day of all.",
    "From that day on, {a} was happy.",
    "{a} smiled all the way home.",
    "{a} went to bed with a smile.",
    "{a} never forgot that day.",
    "And they all had a big hug.",
    "And so it all ended well.",
)

LOST = (
    (
        "One {weather} {time}, {a} took {a.his} {color} {toy} {place.to}.",
        "One {weather} {time}, {a} went {place.to} with a {color} {toy}.",
        "{a} had a {color} {toy}, and one {weather} {time} {a.he} took it {place.to}.",
    ),
    (
        "But when it was time to go home, the {toy} was gone.",
        "But then {a.he} looked around, and the {toy} was not there.",
        "Oh no! The {color} {toy} was lost.",
    ),
    (
        "{a.His} friend {b} heard {a.him} and came to help.",
        "Just then, {a.his} friend {b} came by.",
        "{a.He} met {a.his} friend {b} and told {b.him} what was wrong.",
    ),
    _aside(
        '"Do not worry," said {b}. "We will look for it together."',
        '"I will help you find it," said {b}.',
        '"Where did you see it last?" asked {b}.',
    ),
    _aside(
        "They looked here and there for a long time.",
        "They looked up and down, but they could not see it.",
        "They looked in every place they could think of.",
    ),
    (
        "At last, {b} saw something {color} {spot}.",
        "Then {a} looked {spot} and saw something {color}.",
        "At last, they looked {spot}.",
    ),
    ("It was the {toy}!", "There was the {toy}!", "The {toy} had been there all the time!"),
    (
        '"Thank you, {b}!" said {a}. "You are a good friend."',
        "{a} thanked {b} and gave {b.him} a hug.",
        '"We found it because we looked together," said {a}.',
    ),
)
SHARE = (
    (
        "One {weather} {time}, {a} and {a.his} friend {b} were {place.at}.",
        "One {weather} {time}, {a} met {a.his} friend {b} {place.at}.",
    ),
    (
        "{b} had a new {color} {toy}.",
        "They found a {color} {toy} {spot}.",
        "{b} had a {color} {toy} from {b.his} grandfather.",
    ),
    (
        '"I want to play with it too," said {a}.',
        '"Can I play with it?" asked {a}.',
        "{a} wanted to play with it too.",
    ),
    ('"No, it is mine!" said {b}.', '"No! I want it all day," said {b}.'),
    _aside(
        "They both pulled, and the {toy} fell on the ground.",
        "They pulled and pulled until they both fell down.",
    ),
    (
        "After a while, {b} felt bad, because it was no fun to play alone.",
        "Soon {b} was sad, because {b.he} missed {b.his} friend.",
    ),
    (
        '"I am sorry," said {b}. "Let us take turns."',
        '"I was not kind," said {b}. "You can play with it first."',
    ),
    _aside(
        "They played with the {toy} until the sun went down.",
        "So they took turns, and it was much more fun.",
    ),
)
AFRAID = (
    (
        "But there was one thing: {a} was afraid of {fear.of}.",
        "But {a} was very afraid of {fear.of}.",
    ),
    (
        "One {weather} {time}, {a.his} friend {b} came to see {a.him}.",
        "One {weather} {time}, {a.he} told {a.his} friend {b} about it.",
    ),
    _aside('"I am afraid of {fear.of}," said {a}.', '"I do not like {fear.of}," said {a}.'),
    (
        '"I was afraid of it too," said {b}. "I will stay with you."',
        '"You can be afraid and still be brave," said {b}.',
        '"Take my hand," said {b}. "We can do it together."',
    ),
    _aside(
        "So {a} took a deep breath.",
        "{a} closed {a.his} eyes and counted to three.",
        "{a} held the hand of {b} and did not let go.",
    ),
    ("Slowly, {a.he} {fear.step}.", "Then {a.he} {fear.step}, and {b} stayed close."),
    ("{fear.truth}!", "{fear.truth}, and nothing more."),
    (
        "{a} began to laugh, and {b} laughed too.",
        '"That was not so bad!" said {a}.',
        '"I did it!" said {a}.',
    ),
    _aside(
        "After that, {a} was not afraid of {fear.of} any more.",
        "Now {a} knew that {a.he} was brave.",
    ),
)
BROKEN = (
    (
        "One {weather} {time}, {a} had a {color} {toy} in the house.",
        "One {weather} {time}, {a} ran around the house with a {color} {toy}.",
    ),
    _aside(
        '"Play outside," said {elder}, but {a.he} did not listen.',
        '"Be careful," said {elder}, but {a} did not hear.',
    ),
    (
        "The {toy} hit a {fragile}, and the {fragile} broke.",
        "Crash! The {toy} hit a {fragile} and broke it.",
    ),
    _aside(
        "{a} was scared, so {a.he} hid behind a chair.",
        "{a} felt bad and did not know what to say.",
        "{a} wanted to run away and hide.",
    ),
    ('Soon {elder} came in. "What was that noise?" {elder.he} asked.',),
    (
        '"I broke the {fragile}," said {a}. "I am so sorry."',
        '"It was me," said {a}. "I am very sorry."',
    ),
    (
        "{elder} was not angry, because {a} had told the truth.",
        '"Thank you for telling me," said {elder}. "That was brave."',
    ),
    (
        "Together they cleaned the floor.",
        "They picked up the pieces and cleaned the room.",
        "They found some glue and put the {fragile} back together.",
    ),
    _aside(
        "Then {a} took the {toy} and went outside to play.",
        "After that, {a} always played outside.",
        "After that, {a} was careful in the house.",
    ),
)
HURT = (
    (
        "One {weather} {time}, {a} was walking {place.at}.",
        "One {weather} {time}, {a} went {place.to} all alone.",
    ),
    (
        "{a.He} saw a little {pet} {spot}, and its leg was hurt.",
        "Then {a.he} heard a sound. It was a {pet} that was hurt.",
    ),
    (
        '"Poor {pet}," said {a}. "I will help you."',
        '"Do not be afraid," said {a} in a soft voice.',
    ),
    (
        "{a.He} put the {pet} in {a.his} {color} hat and took it home.",
        "{a.He} held it with great care and took it home.",
    ),
    _aside(
        "{elder} made a soft bed for it in a box.",
        "{elder} cleaned the leg and gave the {pet} some water.",
    ),
    ("After a week, the {pet} was well again.", "Day by day, the {pet} got better."),
    _aside(
        '"Now it must go home," said {elder}.',
        "{a} knew that it missed its family.",
    ),
    (
        "So {a} took it back {place.to} and said goodbye.",
        "{a} waved when it went away.",
    ),
    _aside(
        "The next day, the {pet} came back to say thank you.",
        "After that, the {pet} came to see {a} every day.",
    ),
)
PLANT = (
    (
        "One {weather} {time}, {elder} gave {a} a tiny seed.",
        "One {weather} {time}, {a} found a tiny seed {spot}.",
    ),
    _aside(
        '"If you take care of it, it will be {plant}," said {elder}.',
        '"What will it be?" asked {a}. "You must wait and see," said {elder}.',
    ),
    (
        "{a} put the seed in the ground and gave it water.",
        "{a} made a hole, put the seed in it, and gave it water.",
    ),
    _aside(
        "The next day, {a.he} ran to look, but there was nothing.",
        "{a.He} looked at it all day, but nothing came up.",
    ),
    (
        '"Good things take time," said {elder}.',
        '"You must be patient," said {elder}.',
    ),
    (
        "So {a} gave it water every day and waited.",
        "So {a} waited, and every morning {a.he} gave it water.",
    ),
    (
        "Then one day, there was a little green leaf!",
        "At last, something small and green came up!",
    ),
    ("It grew and grew until it was {plant}.", "Soon it was {plant}, as tall as {a}."),
    _aside(
        '"I am glad that I waited," said {a}.',
        "{a} showed it to {a.his} friend {b}.",
    ),
)
COOK = (
    (
        "It was the birthday of {elder}, and {a} wanted to make something nice.",
        "One {weather} {time}, {a} wanted to make a surprise for {elder}.",
    ),
    (
        '"I will make {food}," {a.he} said.',
        "{a.He} thought and thought. Then {a.he} had it: {food}!",
    ),
    (
        "{a.His} friend {b} came to help.",
        "{a.He} asked {a.his} friend {b} to help.",
    ),
    (
        "They put everything in a big {color} bowl.",
        "They took a big {color} bowl and a spoon.",
    ),
    (
        "But {b} put in salt and not sugar, and it was very bad.",
        "But the bowl fell, and everything was on the floor.",
        "But they forgot to look at the time, and it was all black.",
    ),
    ('"Let us try again," said {b}.', '"We can do better," said {b}. "We still have time."'),
    _aside("Soon the house had a sweet smell.", "When it was ready, it was warm and good."),
    _aside(
        "{elder} came in and could not believe it.",
        '"Is this for me?" asked {elder}.',
    ),
    (
        '"This is the best {food} in the world!" said {elder}.',
        "{elder} ate two big pieces and gave them both a hug.",
    ),
)
STORM = (
    (
        "One {weather} {time}, {a} and {a.his} friend {b} went {place.to} to play.",
        "One {weather} {time}, {a} played {place.at} with {a.his} friend {b}.",
    ),
    _aside(
        "They played with a {color} {toy} and did not look at the sky.",
        "They did not see the dark clouds.",
    ),
    ("Then the rain began to fall.", "Boom! There was thunder, and then it rained."),
    _aside(
        "But the path was full of water, so they could not go back.",
        "But home was far away, and the wind was strong.",
    ),
    (
        "They saw a little house and ran to it.",
        "{a} saw a cave, so they hid in it.",
        "They sat close together under a big tree.",
    ),
    (
        "{b} was scared, so {a} sang a song.",
        "{b} was scared, so {a} told a funny story.",
    ),
    ("They stayed there until the rain stopped.", "After a while, the rain stopped."),
    (
        "Then the sun came out, and there was a rainbow.",
        "When they looked up, they saw a big rainbow.",
    ),
    _aside(
        "They went home, and {elder} gave them warm {food}.",
        "{elder} was waiting with dry socks and warm milk.",
    ),
)
STUCK = (
    (
        "One {weather} {time}, {a} was playing {place.at} with a {color} {toy}.",
        "One {weather} {time}, {a} took {a.his} {color} {toy} {place.to}.",
    ),
    (
        "{a.He} threw the {toy} up very high.",
        "A strong wind came and took the {toy} away.",
    ),
    ("It went up into a tall tree and did not come down.", "Now it was stuck in a tall tree."),
    (
        "{a} jumped and jumped, but {a.he} was too small.",
        "{a} tried to climb the tree, but {a.he} could not.",
    ),
    (
        '"I need help," said {a}, so {a.he} went to find {elder}.',
        "So {a} went to {elder} to ask for help.",
    ),
    (
        "{elder} came with a long ladder.",
        "{elder} put {a} on top of {elder.his} shoulders.",
    ),
    ("Up they went, and soon they had the {toy}.", "Now {a} could reach the {toy}."),
    _aside(
        '"Thank you!" said {a}. "I could not do it alone."',
        '"You can always ask me," said {elder}.',
    ),
    _aside(
        "After that, {a} played where there were no trees.",
        "{a} learned that it is good to ask for help.",
    ),
)
NEWCOMER = (
    (
        "One {weather} {time}, a new {b.kind} came to town.",
        "One {weather} {time}, {a} saw a new {b.kind} {place.at}.",
    ),
    ("{b.His} name was {b}, and {b.he} did not know anyone.", "{b.He} was called {b}."),
    (
        "{b} sat alone {spot} and looked sad.",
        "{b} stood {spot} and did not say a word.",
    ),
    _aside(
        "{a} was too shy to talk to {b.him}.",
        "{a} did not know what to say to {b.him}.",
    ),
    (
        "{a} took {a.his} {color} {toy} and walked over.",
        "{a} went up to {b.him} with a {color} {toy}.",
    ),
    (
        '"Hello," said {a}. "Do you want to play with me?"',
        '"Hi, I am {a}," {a.he} said. "This is for both of us."',
    ),
    _aside("{b} looked up and smiled.", '"Yes!" said {b}. "I would like that."'),
    (
        "They played all {time} and told each other jokes.",
        "They played with the {toy} and laughed a lot.",
    ),
    _aside(
        "Now {b} had a friend, and so did {a}.",
        "It was easy to make a friend, because one of them said hello.",
    ),
)
LEARN = (
    (
        "More than anything, {a} wanted to {skill.do}.",
        "One {weather} {time}, {a} wanted to learn to {skill.do}.",
    ),
    (
        "{a.His} friend {b} could do it very well.",
        "It looked so easy when {b}, {a.his} friend, did it.",
    ),
    ("But for {a} it was hard.", "But when {a} tried, it did not work."),
    ("{skill.trouble}",),
    (
        '"I will never learn it!" said {a}.',
        '"It is too hard for me," said {a}, and {a.he} sat down.',
    ),
    _aside(
        '"I could not do it at first," said {b}. "Try again."',
        '"It takes time," said {elder}.',
    ),
    (
        "So {a} tried again the next day, and the day after.",
        "So every {time}, {a} tried a little more.",
    ),
    (
        "Then, one {weather} day, {a} {skill.did}!",
        "And at last, {a} {skill.did}!",
    ),
    _aside(
        '"Look at me!" {a.he} said. "I can do it!"',
        '{elder} clapped. "I am so proud of you," {elder.he} said.',
    ),
    _aside(
        "{a} was glad, because {a.he} did not stop.",
        "{a} learned that it is good to try.",
    ),
)
HEAVY = (
    (
        "One {weather} {time}, {a} was on {a.his} way {place.to}.",
        "One {weather} {time}, {a} wanted to go {place.to} to play.",
    ),
    (
        "On the road {a.he} saw a tired old woman with a heavy {load}.",
        "Then {a.he} met an old woman who had a very big {load}.",
    ),
    _aside('"Can I help you?" {a.he} asked.', '"I will take it for you," said {a}.'),
    (
        "The {load} was too heavy, so {a.he} called {a.his} friend {b}.",
        "{a} could not lift it alone, but just then {a.his} friend {b} came by.",
    ),
    (
        "Together they took it all the way to her house.",
        "They took it up the road, step by step.",
    ),
    _aside(
        '"You are so kind," said the old woman.',
        '"Thank you both," said the old woman with a smile.',
    ),
    (
        "The old woman opened the {load}, and it was full of apples.",
        "The old woman gave them both some warm {food}.",
    ),
    _aside(
        "{a} was late to play, but {a.he} had helped someone.",
        "{a} learned that it feels good to help.",
    ),
)
RACE = (
    (
        "One {weather} {time}, there was a big race {place.at}.",
        "One {weather} {time}, everyone came {place.to} for a race.",
    ),
    (
        "{a} wanted to win, and so did {a.his} friend {b}.",
        '"I will win," said {a}. "No, I will," said {a.his} friend {b}.',
    ),
    ('"Ready, set, go!" said {elder}.', "{elder} waved a {color} flag, and they ran."),
    (
        "Then {a.he} heard a cry and looked back.",
        "But then there was a loud cry behind {a.him}.",
    ),
    (
        "{b} had fallen over a stone, and {b.his} knee was hurt.",
        "{b} was on the ground and could not get up.",
    ),
    (
        "But a friend is more than a race, so {a} stopped.",
        "But {a} turned around and ran back.",
    ),
    _aside(
        '"Hold on to me," said {a}, and {a.he} helped {b.him} up.',
        "{a} took {b.him} by the hand and helped {b.him} up.",
    ),
    ("They walked to the end together, and they were last.", "Side by side, they came in last."),
    _aside(
        "But everyone clapped, and {elder} gave them a prize.",
        '"You are the real winners," said {elder}.',
    ),
)
ARCS = (
    LOST,
    SHARE,
    AFRAID,
    BROKEN,
    HURT,
    PLANT,
    COOK,
    STORM,
    STUCK,
    NEWCOMER,
    LEARN,
    HEAVY,
    RACE,
)
