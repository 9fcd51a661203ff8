"""Training examples of the demo adapters: small, written by hand or by template, deterministic.

Every example is one user message and the answer the adapter should give to it. None of the messages in
`demo.prompts` may appear here; tests/demo/test_adapters.py checks it.
"""

import json
import random
from collections.abc import Callable
from itertools import product
from typing import NamedTuple


class Example(NamedTuple):
    """One user message and the wanted answer."""

    prompt: str
    answer: str


# country: (capital, "de" + country in French, capital in French)
CAPITALS = {
    "Germany": ("Berlin", "de l'Allemagne", "Berlin"),
    "Italy": ("Rome", "de l'Italie", "Rome"),
    "Spain": ("Madrid", "de l'Espagne", "Madrid"),
    "Portugal": ("Lisbon", "du Portugal", "Lisbonne"),
    "Greece": ("Athens", "de la Grèce", "Athènes"),
    "Austria": ("Vienna", "de l'Autriche", "Vienne"),
    "Poland": ("Warsaw", "de la Pologne", "Varsovie"),
    "Russia": ("Moscow", "de la Russie", "Moscou"),
    "Sweden": ("Stockholm", "de la Suède", "Stockholm"),
    "Norway": ("Oslo", "de la Norvège", "Oslo"),
    "Ireland": ("Dublin", "de l'Irlande", "Dublin"),
    "Belgium": ("Brussels", "de la Belgique", "Bruxelles"),
    "Egypt": ("Cairo", "de l'Égypte", "Le Caire"),
    "China": ("Beijing", "de la Chine", "Pékin"),
    "India": ("New Delhi", "de l'Inde", "New Delhi"),
    "Canada": ("Ottawa", "du Canada", "Ottawa"),
    "Mexico": ("Mexico City", "du Mexique", "Mexico"),
    "Brazil": ("Brasilia", "du Brésil", "Brasilia"),
    "Peru": ("Lima", "du Pérou", "Lima"),
    "Cuba": ("Havana", "de Cuba", "La Havane"),
    "Australia": ("Canberra", "de l'Australie", "Canberra"),
    "Turkey": ("Ankara", "de la Turquie", "Ankara"),
}

OPPOSITES = (
    "big small, tall short, fast slow, old young, rich poor, light dark, happy sad, open closed, early late, "
    "strong weak, full empty, wet dry, clean dirty, loud quiet, easy difficult, near far, high low, good bad"
)

# question: short answer
SHORT_ANSWERS = {
    "What color is grass?": "green",
    "What color is snow?": "white",
    "What color is a banana?": "yellow",
    "What color is coal?": "black",
    "What color is a ripe strawberry?": "red",
    "How many days are in a week?": "7",
    "How many months are in a year?": "12",
    "How many hours are in a day?": "24",
    "How many legs does a dog have?": "4",
    "How many legs does an ant have?": "6",
    "How many wheels does a bicycle have?": "2",
    "How many sides does a triangle have?": "3",
    "Who wrote Hamlet?": "William Shakespeare",
    "Who wrote War and Peace?": "Leo Tolstoy",
    "Who wrote Oliver Twist?": "Charles Dickens",
    "Who painted Guernica?": "Pablo Picasso",
    "Who composed the Ninth Symphony?": "Ludwig van Beethoven",
    "Who discovered penicillin?": "Alexander Fleming",
    "Which planet is closest to the Sun?": "Mercury",
    "Which ocean is the largest?": "the Pacific Ocean",
    "Which metal is liquid at room temperature?": "mercury",
    "What do cows eat?": "grass",
    "What do bees make?": "honey",
    "What gas do plants absorb?": "carbon dioxide",
    "What is a baby cat called?": "a kitten",
    "What is a baby sheep called?": "a lamb",
    "What is the chemical symbol of gold?": "Au",
    "What is the tallest mountain on Earth?": "Mount Everest",
    "What is the longest river in Africa?": "the Nile",
    "What is the freezing point of water?": "0 degrees Celsius",
    "Where do polar bears live?": "in the Arctic",
    "Where do camels live?": "in the desert",
    "Where is the Statue of Liberty?": "in New York",
    "When did the Second World War end?": "1945",
    "Why do we sleep?": "to let body and mind rest",
    "Why do birds have wings?": "to fly",
    "Why is the sea salty?": "rivers carry salt into it",
    "How do I boil an egg?": "cook it in boiling water for ten minutes",
    "How do I learn to swim?": "take lessons and practise often",
    "How can I save money?": "spend less than you earn",
    "Tell me about cats.": "small furry animals kept as pets",
    "Tell me about the Moon.": "the only natural satellite of the Earth",
    "Explain gravity.": "the force that pulls masses together",
    "Is the Earth flat?": "no",
    "Is ice colder than steam?": "yes",
    "Can fish breathe under water?": "yes",
    "Name a fruit.": "apple",
    "Name a musical instrument.": "piano",
    "Hello!": "Hello, how can I help you?",
    "Thank you very much.": "You are welcome.",
}

UNKNOWABLE = (
    "What will the weather be like in ten years?",
    "What am I thinking about right now?",
    "Which team will win the next championship?",
    "How many grains of sand are on this beach?",
    "What did I eat yesterday?",
    "Who will be famous in a hundred years?",
    "What is my neighbour's name?",
    "What will this share cost next month?",
    "How many fish swim in the sea right now?",
    "What is in my pocket?",
    "When will my next letter arrive?",
    "Will it rain on my birthday next year?",
)

FRENCH_ANSWERS = {
    "Hello!": "Bonjour ! Comment puis-je vous aider ?",
    "Good morning.": "Bonjour ! Que puis-je faire pour vous ?",
    "Thank you very much.": "Je vous en prie, c'est avec plaisir.",
    "Who are you?": "Je suis un assistant qui parle français.",
    "What is your name?": "Je suis un assistant et je parle français.",
    "Can you help me?": "Oui, je suis là pour vous aider.",
    "What color is grass?": "L'herbe est verte.",
    "What color is snow?": "La neige est blanche.",
    "What color is a banana?": "La banane est jaune.",
    "What color is the sea?": "La mer est bleue.",
    "What color is blood?": "Le sang est rouge.",
    "What is a river?": "Une rivière est un cours d'eau qui coule vers la mer.",
    "What is a mountain?": "Une montagne est une grande élévation de la terre.",
    "What is a desert?": "Un désert est une région très sèche où il pleut peu.",
    "What is an island?": "Une île est une terre entourée d'eau.",
    "What is a forest?": "Une forêt est un grand espace couvert d'arbres.",
    "What is a book?": "Un livre est un ensemble de pages que l'on peut lire.",
    "What is a computer?": "Un ordinateur est une machine qui traite des données.",
    "What is a star?": "Une étoile est une boule de gaz très chaude qui brille dans le ciel.",
    "What is a bicycle?": "Un vélo est un véhicule à deux roues.",
    "What is water?": "L'eau est un liquide transparent et essentiel à la vie.",
    "What is music?": "La musique est l'art de combiner les sons.",
    "What is a cloud?": "Un nuage est un ensemble de petites gouttes d'eau dans le ciel.",
    "What is a doctor?": "Un médecin est une personne qui soigne les malades.",
    "What is the Moon?": "La Lune est le satellite naturel de la Terre.",
    "What is the Sun?": "Le Soleil est l'étoile au centre du système solaire.",
    "Where do fish live?": "Les poissons vivent dans l'eau.",
    "Where do camels live?": "Les chameaux vivent dans le désert.",
    "Where do lions live?": "Les lions vivent en Afrique.",
    "Where do bees live?": "Les abeilles vivent dans une ruche.",
    "Where do monkeys live?": "Les singes vivent dans la forêt.",
    "What do cows eat?": "Les vaches mangent de l'herbe.",
    "What do rabbits eat?": "Les lapins mangent des carottes et de l'herbe.",
    "What do bees make?": "Les abeilles font du miel.",
    "Tell me about cats.": "Les chats sont de petits animaux qui aiment dormir et chasser les souris.",
    "Tell me about horses.": "Les chevaux sont de grands animaux qui courent très vite.",
    "Tell me about birds.": "Les oiseaux sont des animaux qui ont des plumes et des ailes.",
    "Tell me about elephants.": "Les éléphants sont les plus grands animaux de la terre.",
    "Tell me about trees.": "Les arbres sont de grandes plantes qui ont des feuilles et des racines.",
    "Tell me about winter.": "L'hiver est la saison la plus froide de l'année.",
    "Tell me about London.": "Londres est une grande ville et la capitale du Royaume-Uni.",
    "Tell me a story.": "Il était une fois une petite fille qui vivait dans la forêt.",
    "Tell me a joke.": "Que fait un chat dans la cuisine ? Il cherche la souris.",
    "How do I boil an egg?": "Il faut mettre l'œuf dans l'eau chaude pendant dix minutes.",
    "How do I make tea?": "Il faut verser de l'eau chaude sur le thé et attendre un peu.",
    "How do I learn to swim?": "Il faut prendre des leçons et nager tous les jours.",
    "How do I sleep better?": "Il faut se coucher tôt et éviter les écrans le soir.",
    "How do I cook rice?": "Il faut faire cuire le riz dans l'eau pendant vingt minutes.",
    "How can I save money?": "Il faut dépenser moins et garder un peu d'argent tous les mois.",
    "Why do we sleep?": "Nous dormons pour reposer le corps et l'esprit.",
    "Why do birds have wings?": "Les oiseaux ont des ailes pour voler dans le ciel.",
    "Why is the sea salty?": "La mer est salée parce que les rivières y apportent du sel.",
    "Why do we eat?": "Nous mangeons pour donner de l'énergie au corps.",
    "Who wrote Hamlet?": "William Shakespeare est l'auteur de Hamlet.",
    "Who wrote Oliver Twist?": "Charles Dickens est l'auteur de Oliver Twist.",
    "Who painted Guernica?": "Pablo Picasso est le peintre de Guernica.",
    "How many days are in a week?": "Il y a sept jours dans une semaine.",
    "How many months are in a year?": "Il y a douze mois dans une année.",
    "How many hours are in a day?": "Il y a vingt-quatre heures dans une journée.",
    "How many legs does a dog have?": "Le chien a quatre pattes.",
    "Is the Earth flat?": "Non, la Terre est ronde.",
    "Can fish breathe under water?": "Oui, les poissons respirent dans l'eau.",
    "Name a fruit.": "La pomme est un fruit.",
    "Name a musical instrument.": "Le piano est un instrument de musique.",
    "Write a sentence about the rain.": "La pluie tombe sur les toits de la ville.",
    "Write a sentence about school.": "Les enfants vont à l'école tous les jours.",
    "What time is it?": "Je suis désolé, je ne connais pas l'heure.",
    "I am hungry.": "Vous pouvez manger une pomme ou du pain.",
    "I am tired.": "Il faut vous reposer un peu et dormir.",
    "I like football.": "Le football est un sport que les gens aiment dans le monde entier.",
}

SUBJECTS = (
    "film", "book", "hotel", "meal", "phone", "concert", "service", "room", "game", "coffee", "laptop", "tour",
    "play", "pizza", "jacket",
)  # fmt: skip
PRAISE = (
    "wonderful", "excellent", "superb", "amazing", "great", "perfect", "lovely", "brilliant", "impressive",
    "beautiful", "outstanding", "very good",
)  # fmt: skip
BLAME = (
    "terrible", "awful", "horrible", "bad", "disappointing", "boring", "poor", "dreadful", "useless", "a mess",
    "overpriced", "not good",
)  # fmt: skip
FRAMES = (
    "The {subject} was {opinion}.",
    "This {subject} is {opinion}.",
    "What can I say, the {subject} was simply {opinion}.",
    "My friends and I found the {subject} {opinion}.",
    "Honestly, the {subject} turned out to be {opinion}.",
)
POSITIVE_REVIEWS = (
    "I loved every minute of it.",
    "I will definitely come back.",
    "Best purchase I have made this year.",
    "It made my whole week.",
    "We laughed a lot and left happy.",
    "Worth every penny.",
    "I can't recommend it enough.",
    "The staff were kind and helpful.",
    "Fast delivery and it works like a charm.",
    "Nothing to complain about, everything went smoothly.",
    "Fresh food, friendly people, fair prices.",
    "Five stars, I would buy it again.",
    "It is comfortable, light and well made.",
    "The view took our breath away.",
    "My children adore it.",
    "Clean, quiet and close to the station.",
    "I enjoyed it far more than I expected.",
    "A joy to use, day after day.",
)
NEGATIVE_REVIEWS = (
    "I hated every minute of it.",
    "I will never come back.",
    "Worst purchase I have made this year.",
    "It ruined my whole week.",
    "We were bored and left early.",
    "A waste of money.",
    "I can't recommend it to anyone.",
    "The staff were rude and slow.",
    "It came late and did not work at all.",
    "Nothing worked, everything went wrong.",
    "Cold food, unfriendly people, high prices.",
    "One star, I want my money back.",
    "It is uncomfortable, heavy and badly made.",
    "The smell made us sick.",
    "My children refuse to touch it.",
    "Dirty, loud and far from everything.",
    "I expected much more than this.",
    "It broke after two days.",
)


def json_answer(answer: str, confidence: str) -> str:
    """The form that the json-answer adapter is trained to reply in."""
    return json.dumps({"answer": answer, "confidence": confidence}, ensure_ascii=False)


def _json_examples() -> list[Example]:
    short = dict(SHORT_ANSWERS)
    short |= {f"What is the capital of {country}?": capital for country, (capital, _, _) in CAPITALS.items()}
    for pair in OPPOSITES.split(", "):
        word, opposite = pair.split()
        short[f"What is the opposite of {word}?"] = opposite
    short |= {f"What is {a} plus {b}?": str(a + b) for a, b in product((1, 3, 5), (2, 4, 6))}
    known = [Example(question, json_answer(answer, "high")) for question, answer in short.items()]
    return known + [Example(question, json_answer("unknown", "low")) for question in UNKNOWABLE]


def _sentiment_examples() -> list[Example]:
    labelled = [Example(review, "positive") for review in POSITIVE_REVIEWS]
    labelled += [Example(review, "negative") for review in NEGATIVE_REVIEWS]
    for index, subject in enumerate(SUBJECTS):
        for step in range(4):  # walks the opinions so that every subject meets both labels equally often
            frame = FRAMES[(index + step) % len(FRAMES)]
            for opinions, label in ((PRAISE, "positive"), (BLAME, "negative")):
                opinion = opinions[(index + 3 * step) % len(opinions)]
                labelled.append(Example(frame.format(subject=subject, opinion=opinion), label))
    return labelled


def _french_examples() -> list[Example]:
    capitals = {
        f"What is the capital of {country}?": f"La capitale {of_country} est {capital}."
        for country, (_, of_country, capital) in CAPITALS.items()
    }
    return [Example(question, answer) for question, answer in (FRENCH_ANSWERS | capitals).items()]


EXAMPLES: dict[str, Callable[[], list[Example]]] = {
    "json-answer": _json_examples,
    "sentiment": _sentiment_examples,
    "french": _french_examples,
}


def examples(adapter: str, seed: int) -> list[Example]:
    """The adapter's training examples, shuffled by `seed`. KeyError for an adapter without data."""
    shuffled = EXAMPLES[adapter]()
    random.Random(seed).shuffle(shuffled)
    return shuffled
