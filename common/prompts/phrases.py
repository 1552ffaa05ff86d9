"""The phrases by which a text states, doubts, denies or takes back an answer: one table, from which
patterns are built.
"""

_TABLE = r"""
doubt: maybe, perhaps, possibly, probably, presumably, either, guess, guessing, guessed, unsure,
    uncertain, unlikely, doubt, doubtful, impossible, not sure, not certain, not true, no way,
    no idea, nobody, no one, who knows, not think, not believe, not know, \w*n['’]t think,
    \w*n['’]t believe, \w*n['’]t know, wrong answer, incorrect answer, false that, untrue that,
    not follow, not conclude, cannot conclude, not mean, not imply, not the case, not possible,
    not clear, likely, nothing;
could: might, may be, could, possible, neither, nor, unclear, unknown;
states: is, are, was, were, equals, becomes, remains, would be, should be, must be, will be,
    has to be, comes to, comes out to, is going to be, comes out to be, works out to,
    works out to be, turns out to be, seems to be, appears to be;
wavers: could, might, may, can, can['’]t, cannot, isn['’]t, aren['’]t, wasn['’]t, ain['’]t,
    won['’]t, lies, falls, exceeds, does;
filler: therefore, thus, then, hence, so, simply, just, indeed, clearly, exactly, precisely,
    approximately, about, equal to, given by, that, option, choice, a total of, the number,
    the value, the integer, the fraction, the set, the interval, the point, the expression,
    definitely, certainly, obviously, of course, also, now, still, again, always, actually, really,
    found to be;
restates: is, are, equals, get, gives, gets;
instead: not, rather than, instead of, as opposed to;
reason: because, since, so, as, thus, hence, therefore, given, assuming, where, when;
remark: which, after, from, is the answer, is the final answer, is the correct answer, and that,
    and this, and the, and we, and it, and they, and he, and she, and i, and so, and is, and are,
    and thus, and hence, and therefore, and our, for all, for every, for each, for any, for the,
    for this, for these, for those, for both, of the, of a, of an, of his, of her, of its, of their,
    of all, are left, is left, were left, remain, are needed, in total, in all, in simplest,
    in lowest, in reduced, in this, in the, is correct, is right,
    is the (?:right|correct|best) (?:answer|option|choice|one);
continues: alternatively, and, or, but, maybe, perhaps, possibly, probably, though, although, not,
    nor, either, if, unless, plus, minus, times, otherwise, mod;
denied filler: be, equal, equals, to, is, really, exactly, definitely, just, the, actually, option,
    get, have, x, =, that, it;
believes: true, think, believe, say, claim, the case, way;
no label: if, suppose, assume, assuming, whether, when, unless, wrong, incorrect, false, check,
    verify, student, his, her, their, your, last \w+, previously, previous, earlier, yesterday,
    at first, initially;
leads to a value: of, for, by, in, from, to, the, than, each, and, or, x, at, other, these, so, is,
    was, on, over, per, during, until, before;
acts: has, have, had, is, are, was, were, will, can, would, should, must, needs?, needed, earns?,
    earned, makes?, made, pays?, paid, costs?, spends?, spent, sells?, sold, gets?, got, takes?,
    took, eats?, ate, buys?, bought, saves?, saved, receives?, received, uses?, used, left, gives?,
    gave, walks?, walked, runs?, ran, drives?, drove, reads?, collects?, collected, loses?, lost;
others say: common mistake, common error, misconception, mistake is, mistake would be,
    (?:(?:many|some|most) people|you|one) (?:would|might|may|could)
    (?:say|think|answer|guess),
    tempt(?:ing|ed) to (?:say|think|answer|guess|conclude);
starts anew: is, are, was, were, must be, would be, will be, should be, to be, equals, rounds to,
    rounds up to, rounded to, adds? up to, gives, makes, leaves, leaving, making, giving, has, have,
    had, so, thus, hence, therefore, then;
limits: not, never, fail to, fails to, failed to, unable to, none, hardly, barely, scarcely, cannot,
    can be, not equal to, not be, without, except, except for, besides, other than, anything but,
    far from, or, between, less than, more than, fewer than, greater than, larger than,
    smaller than, bigger than, higher than, lower than, at least, at most, up to, under, over,
    above, below, beyond, nearly, almost, close to, near, short of, exceeds, exceeding, within,
    twice, thrice, double, triple, half of, root of, square of, cube of, power of, multiple of,
    factor of, divisor of, reciprocal of, inverse of, negative of, opposite of, logarithm of,
    log of, factorial of, plus, minus, negative, divided by, multiplied by, modulo, times, roughly,
    around, ruled out, all but, about, supposedly, allegedly, nicht, höchstens, mindestens,
    weniger als, mehr als, n['’]est pas, au moins, au plus, moins de, plus de, no es, no son,
    al menos, menos de, más de, não é, não são, non è, не, pas, non(?=\s), não, no quedan?, no hay,
    no tienen?, менее, более, меньше, больше;
limits after: is not, are not, was not, would not, isn['’]t, aren['’]t, is wrong, is incorrect,
    is false, is impossible, cannot, or more, or less, or so, or fewer, or greater, or higher,
    or lower, or maybe, or perhaps, factorial, squared, cubed, at least, at most, maybe, negatives,
    opposites, inverses, reciprocals, halves, thirds, quarters, fourths, fifths, sixths, sevenths,
    eighths, ninths, tenths, hundredths, thousandths, hundreds, thousands, dozens, pairs(?! of),
    tens, twos, couples, factorials, millionths, at best, at the most, at the least, tops;
denies: not, n['’]t, cannot, never, hardly, barely, no longer, impossible to, no way to, none of,
    none, fail to, fails to, failed to, unable to, might, could, may have, not the case;
interjection: wait, but wait, no(?=[^\w\s-]|\s[-–—$0-9]), no wait, oops, hmm, sorry, actually,
    hold on, ah, oh, or rather, i mean, i meant, nein, ach, halt, warte, moment(?=[^\w\s]| mal),
    eigentlich, in fact, strictly speaking, entschuldigung, entschuldige, on second thoughts?,
    on reflection, upon reflection, on closer inspection,
    (?:my )?apologies, ich korrigiere, je corrige, corrijo, attention(?= ?:), vielmehr,
    besser gesagt, non(?=[^\w\s-]), attends, attendez, pardon, désolée?, en fait, ou plutôt, perdón,
    espera, en realidad, mejor dicho, não(?=[^\w\s]), desculpe, na verdade, ou melhor, anzi,
    aspetta, scusa, scusate, in realtà, ой, нет(?=[^\w\s]), стоп, подождите, извините, вернее,
    точнее, 不, 不对, 等等, 等一下, 抱歉, いや, いえ, いいえ, すみません, 待って, 아니, 아니요,
    아니오, 잠깐, 죄송합니다;
turn: but, so(?= it should),
    (?:after|on|upon) re-?(?:read|check|count|calculat|consider|view|examin)ing,
    the(?= (?:true|correct|right|corrected) \w+ (?:is|should be)), that(?= leaves),
    this(?= leaves), however, although, though, yet, except that,
    (?:da )?aber, jedoch, allerdings, mais, cependant, toutefois, pero, sin embargo, aunque, mas,
    porém, no entanto, contudo, ma, però, tuttavia, но, однако, 但, 但是, 不过, 可是, 然而, しかし,
    ただし, でも, 하지만, 그러나, 그런데;
concludes: so, (?<=\W\s)also, поэтому, значит, so \$?[a-z] =, donc, quindi, por lo tanto, it is,
    it['’]s, that is, which is, which gives, which makes, leaves, leaving, left with, ends up with,
    (?:correct|right|real|true|actual) \w+ is, (?:should|must|has to|ought to) (?:be|have been),
    (?:answer|result|total|sum|value|number|amount) (?:is|comes to|becomes), bleiben, bleibt,
    bleiben nur(?: noch)?,
    es sind, sind es, antwort ist, antwort lautet, ergebnis ist, reste, en reste, restent, c['’]est,
    ce sont, réponse est, résultat est, quedan, queda, respuesta es, resultado es, restam, ficam,
    sobram, resposta é, resultado é, restano, rimangono, restano solo, risposta è, risultato è,
    останется, остаётся, остается, осталось, ответ, получается;
taken back: wrong, all wrong, incorrect, not right, not correct, mistaken, a mistake, an error,
    made a mistake, made an error, isn['’]t right, isn['’]t correct, doesn['’]t look right,
    doesn['’]t seem right, does not look right, can['’]t be right, cannot be right, looks wrong,
    seems wrong, seems off, forgot, missed, overlooked, misread, miscalculated, miscounted,
    misunderstood;
withdrawn: scratch that, correction, edit, updated?(?=:), updated answer, better(?=:),
    i made a mistake, i made an error, my mistake, my bad, i misread, i miscalculated, i miscounted,
    i should have (?:used|added|subtracted|multiplied|divided|counted|included|taken|doubled),
    i misunderstood, i (?:forgot|overlooked|missed|neglected)(?! (?:nothing|no)\b),
    (?:but )?i (?:cannot|can not|can['’]t|could not|couldn['’]t|(?:am|was) (?:unable|not able) to)
    (?:solve|answer|work out|figure out|determine|find(?! the problem))
    (?:it|this|that|the (?:problem|question|answer|solution)),
    (?:(?:this|that|it) )?is (?:just |only )?a (?:wild |random |pure )?(?:guess|placeholder),
    (?:but )?i have no idea, never mind, nevermind, just kidding,
    ignore that, ignore the above, ignore my, disregard that, disregard this, disregard the above,
    disregard my, corrected(?=:), i stand corrected, i revise my, i change my,
    das (?:ist|war) (?:falsch|nicht richtig),
    ich habe (?!nichts)(?:\w+ )?\w+ (?:vergessen|übersehen), ich habe (?:da )?einen fehler gemacht,
    j['’]ai (?:oublié|fait une erreur|commis une erreur), je me corrige,
    (?:he )?(?:cometí|cometido) un error, (?:me )?olvid[éó], he olvidado,
    esqueci(?:-me)?, cometi um erro, errei, ho dimenticato, ho sbagliato, ho fatto un errore,
    я забыл(?:а)?, я допустил(?:а)? ошибку, 我(?:忘|漏)(?:记)?了,
    忘れていました, (?:das )?stimmt nicht, korrektur,
    ich habe mich (?:verrechnet|vertan|geirrt), c['’]est (?:faux|incorrect),
    ce n['’]est pas (?:juste|correct|bon), je me suis trompée?, rectification, me equivoqué,
    me he equivocado, eso está mal, (?:eso )?es incorrecto, corrección, me enganei, está errado,
    correção, è sbagliato, mi sono sbagliat[oa], correzione, я ошиб(?:ся|лась), это неверно,
    исправление, 更正, 订正, (?:我|上面)?(?:算|写|看|弄)错了, (?:这|答案)是错(?:误)?的, 訂正,
    間違(?:え|い)(?:ました|です), 정정, 틀렸습니다, let me (?:correct|revise) (?:that|this|it|my),
    let me (?:change|fix) my,
    i(?: need to| must| should| have to| will|['’]ll) (?:correct|revise|change|fix) my
"""


def phrases(*names: str) -> str:
    """Returns a pattern for any phrase of these names in the table, longer ones first."""
    found: list[str] = []
    for entry in _TABLE.split(";"):
        name, _, listed = entry.strip().partition(": ")
        if name in names:
            found += listed.split(",")
    found.sort(key=len, reverse=True)
    return "(?:" + "|".join(r"\s+".join(phrase.split()) for phrase in found) + ")"
