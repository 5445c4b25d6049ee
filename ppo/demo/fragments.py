"""The hand-written pieces of the demo's reviews.

Every piece that can stand in an answer carries the mood under which it is filed, and VADER, which
labels the preference pairs, reads it the same way: a test checks each one.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Moods:
    """Pieces of one slot by mood."""

    positive: tuple[str, ...]
    negative: tuple[str, ...]
    neutral: tuple[str, ...]

    def all(self) -> tuple[str, ...]:
        return self.positive + self.negative + self.neutral


@dataclass(frozen=True)
class Kind:
    """What is reviewed: the words of its prompts, and what only fits its answers."""

    verb: str
    topics: tuple[str, ...]
    circumstances: tuple[str, ...]
    parts: tuple[str, ...]
    verdicts: Moods
    events: Moods


def _split(text: str) -> tuple[str, ...]:
    """Split at slashes, and undo the line breaks of the source."""
    return tuple(" ".join(piece.split()) for piece in text.split("/"))


def _moods(positive: str, negative: str, neutral: str) -> Moods:
    return Moods(_split(positive), _split(negative), _split(neutral))


OPENINGS = _split("""
    The {topic} {circumstance} was / We finally {verb} the {topic} {circumstance}. It was / Some
    words on the {topic} {circumstance}. It was / I {verb} the {topic} {circumstance} and it was
    / My review of the {topic} {circumstance}: it was / A neighbour told us about the {topic}
    {circumstance}. It was
""")

KINDS = {
    "food": Kind(
        verb="tried",
        topics=_split("""
            mushroom soup / lemon cake / fish curry / cheese plate / bean stew / apple pie /
            noodle bowl / breakfast menu / vegetable pizza / chocolate pudding
        """),
        circumstances=_split("""
            at the corner cafe / on Monday evening / near the station / at the night market / on
            the terrace / in the hotel / by the harbour / at noon / in the museum restaurant
        """),
        parts=_split("""
            the service was / the sauce was / the bread was / the portions were / the coffee was
            / the room was
        """),
        verdicts=_moods(
            """delicious / fresh and full of flavour / warm and comforting / a perfect treat /
            lovely to look at and even better to eat / sweet and light / rich and smooth /
            the best of its kind in town""",
            """disgusting / burnt and bitter / cold and miserable / a sad little heap on a
            plate / rotten on one side / poor and full of water / sour and nasty / the worst
            of its kind in town""",
            """hot and salty / on the salty side / larger than the plate / a little cold /
            served in a bowl / medium spicy""",
        ),
        events=_moods(
            """The cook came out and smiled at us. / We got a free second helping. / My mother
            praised every spoonful. / The smell alone was a joy.""",
            """There was a dead fly in it. / The waiter was rude to my mother. / I felt sick
            for two days. / The bill was wrong and nobody cared to fix it.""",
            """We ate outside. / It took ten minutes to arrive. / I had tea with it. / My
            brother ordered the same. / There were eight tables.""",
        ),
    ),
    "show": Kind(
        verb="saw",
        topics=_split("""
            jazz concert / puppet show / new musical / piano recital / circus / ballet / magic
            show / film about bees / student opera / dance evening
        """),
        circumstances=_split("""
            on Saturday night / in the town hall / at the summer market / in the park / by the
            lake / at the old theatre / in the school gym / on the opening night / under the
            bridge
        """),
        parts=_split("""
            the music was / the story was / the lighting was / the costumes were / the second
            half was / the ending was
        """),
        verdicts=_moods(
            """funny and clever / inspiring from start to end / thrilling / beautiful and
            moving / an amazing evening / full of joy / entertaining for young and old /
            magical and charming""",
            """boring / a stupid bore / painful to watch / dull from start to end / a weak copy
            / silly and annoying / loud and ugly / a depressing evening""",
            """two hours long / mostly in French / shorter than the last one / in four parts /
            for all ages / rather loud""",
        ),
        events=_moods(
            """The crowd cheered at the end. / The children laughed all evening. / I smiled the
            whole way home. / The whole cast was a joy.""",
            """Half of the crowd left in anger. / The sound failed twice. / A man in our row
            cried with boredom. / I left with a bad headache.""",
            """There was a break after an hour. / We sat in row nine. / The hall was half full.
            / It began at eight. / We came by bus.""",
        ),
    ),
    "place": Kind(
        verb="visited",
        topics=_split("""
            old castle / glass museum / botanical garden / town library / small hotel /
            lighthouse / flea market / aquarium / campsite / village bakery
        """),
        circumstances=_split("""
            on the hill / behind the station / by the river / near the harbour / at the edge of
            town / in the old quarter / next to the bridge / beyond the forest / on the island
        """),
        parts=_split("""
            the view was / the garden was / the tour was / the entrance was / the cafe was / the
            signs were
        """),
        verdicts=_moods(
            """beautiful / clean and peaceful / charming in every corner / a hidden treasure /
            a place of calm and beauty / well kept and welcoming / stunning in the evening
            light / great fun for children""",
            """dirty / ugly and gloomy / dangerous after dark / a ruined heap of stones / noisy
            and unfriendly / a tourist trap and a fraud / empty and depressing / damaged
            beyond repair""",
            """larger than on the map / open until six / painted blue / ten minutes from the
            bus stop / built of brick / much smaller than the other one""",
        ),
        events=_moods(
            """The guide was kind and told great stories. / Everyone there was friendly. / The
            children ran around and had fun. / We found a lovely spot for lunch.""",
            """A thief took my bag. / The guard was rude and shouted at us. / The toilets were
            a disgrace. / We argued with the cashier about a wrong ticket.""",
            """We stayed for an hour. / There is a bench at the gate. / It was raining. / We
            walked back along the road. / The ticket was four euros.""",
        ),
    ),
    "trip": Kind(
        verb="took",
        topics=_split("""
            bike tour / boat trip / night train / walking tour / bus ride / kayak tour / island
            ferry / cable car / balloon flight / horse ride
        """),
        circumstances=_split("""
            on Monday morning / along the coast / in the mountains / in early spring / through
            the old town / at dawn / on our second day / after lunch / across the valley
        """),
        parts=_split("""
            the scenery was / the first hour was / the last part was / the weather was / the
            picnic was / the seats were
        """),
        verdicts=_moods(
            """relaxing / an exciting adventure / safe and comfortable / a peaceful escape /
            easy and fun / a happy day for the whole family / well planned and enjoyable /
            the best part of our holiday""",
            """miserable / uncomfortable and dangerous / a tiring and painful mess / a
            nightmare and a scandal / cancelled at the worst moment / a sad way to lose a
            day / delayed by a stupid problem / the worst part of our holiday""",
            """three hours long / mostly uphill / later than on the plan / on the right side of
            the river / in two stages / quieter than last year""",
        ),
        events=_moods(
            """The driver was helpful and cheerful. / We saw dolphins and everyone cheered. /
            Our guide was generous with her time. / We shared great stories on the way.""",
            """The driver was angry with everyone. / My sister got hurt on the way. / We were
            lost in the rain. / The engine was broken and stank.""",
            """Our bags went in the back. / There were twelve of us. / I sat at the back. / It
            started at nine. / We wore coats.""",
        ),
    ),
    "thing": Kind(
        verb="bought",
        topics=_split("""
            desk lamp / rain jacket / coffee grinder / phone case / office chair / garden hose /
            travel bag / bread knife / electric kettle / wall clock
        """),
        circumstances=_split("""
            from the market / from the online shop / in dark green / for my sister / in the
            large size / from the spring catalogue / for the office / from the corner shop /
            with the long name
        """),
        parts=_split("""
            the design was / the colour was / the finish was / the handle was / the instructions
            were / the delivery was
        """),
        verdicts=_moods(
            """useful every single day and a joy to hold / smart and elegant / strong and
            reliable / easy to use / a clever little helper / solid and well made / perfect
            for its purpose / a great gift""",
            """useless / broken on arrival / a defective piece of rubbish / weak and badly made
            / an ugly waste of space / wrong in every detail / faulty from day one / a
            danger to my fingers""",
            """smaller than in the picture / made of plastic / the same as the old one /
            heavier than it looks / delivered in two boxes / made for small hands""",
        ),
        events=_moods(
            """The shop was helpful and honest. / My sister loves it. / It still looks as good
            as new. / It won a prize and I can see why.""",
            """It hurt my hand. / The seller was rude. / It made a horrible noise and died. /
            They ignored every complaint.""",
            """It came on a Tuesday. / I keep it in the hall. / The box was brown. / My brother
            has one in red. / It needs two batteries.""",
        ),
    ),
}

VERDICTS = _moods(
    """excellent / wonderful / superb / great / brilliant / fantastic / a nice surprise / a
    real pleasure / simply perfect / a delight / outstanding / a great success / good in
    every way / better than I had hoped""",
    """awful / terrible / horrible / bad / dreadful / a disaster / a big disappointment / very
    poor / a complete failure / a mess / pathetic / an insult / bad in every way / worse
    than I had feared""",
    """about average / as usual / what we expected / quite ordinary / the same as last year /
    on the short side / in the usual style / neither big nor small / rather plain""",
)

CLOSINGS = _moods(
    """I recommend it with pleasure. / I loved it. / Thank you for the great time. / We were
    happy from start to finish. / What a lovely surprise. / It made my day better. / I am
    still smiling. / I will gladly come back to it. / Well done, everyone. / It deserves a
    prize. / I am so glad we went for it. / My friends enjoyed it too. / It is worth every
    penny. / We had the best time. / I would love to do it again. / Full marks and warm
    thanks.""",
    """I hated it. / What a waste. / I regret it. / It made me angry. / What a sad disaster. /
    Avoid it. / I want to complain. / We were bitterly disappointed. / It is a scandal. / It
    ruined my week. / Shame on them. / I am still upset. / My friends hated it too. / It was
    a bad joke. / We felt cheated. / It is the worst idea of the year.""",
    """That is all. / We left at noon. / It was a Tuesday. / You can find it on the map. / I
    wrote this the same evening. / My cousin was there too. / It is open all year. / We may
    talk about it later. / I took two photos. / There is more of it online. / The rest is up
    to you. / It was our second time.""",
)
