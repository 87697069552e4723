"""Lists of English words for `_english`."""

from __future__ import annotations


def _read_words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Abbreviations whose period ends no sentence, without the last period
ABBREVIATIONS = _read_words(
    """
    mr mrs ms dr prof sr jr st rep reps sen gen gov lt ltd inc co corp cos bros adm col maj messrs
    vs v va ave ft mg okla ore wash wis pa ph.d m.b.a u.s u.k u.n u.s.a u.s.s.r d.c n.y n.j n.c a.m
    p.m s.a c d f h g k l m n p r s t w jan feb dec oct nov aug sep sept tues wed fri calif colo
    j.b j.c j.j j.k n.v conn ariz fla ga ill ky mich minn tenn vt yr ct d.h j.p j.r w.w
    """
)

# Words that begin a sentence even after an abbreviation
STARTERS = _read_words(
    """
    although among both but despite even he however i if in indeed instead it many meanwhile
    moreover most nevertheless nonetheless nor similarly since so some the there these they this
    though thus under when while yet your her here which neither such still ever always sometimes
    tomorrow yesterday soon finally therefore please were does someone nothing between through
    without within unlike together think consider remember try need
    """
)

# Words that begin a sentence after an initial, where other capitalized words may be names, but
# not after an ellipsis
LATE_STARTERS = _read_words(
    """
    you she we b that those a an my his its our their what where who why how as at by for from of on
    to with about after before during until because and or not no all any each every few more much
    other several only also then now just never often today later first second third next last
    perhaps maybe let is are was be do did has have had can could may might must should will would
    one two three people everyone something another once over like according make use take look
    see go come get give find know want new old good great
    """
)

# Words of which the Penn Treebank makes two tokens -> length of the first
CONTRACTIONS = {
    "cannot": 3,
    "gimme": 3,
    "gonna": 3,
    "gotta": 3,
    "lemme": 3,
    "wanna": 3,
    "d'ye": 1,
    "more'n": 4,
}

# The words that nltk's English list calls stop words, apart from parts of contractions
STOP_WORDS = _read_words(
    """
    i me my myself we our ours ourselves you your yours yourself yourselves he him his himself she
    her hers herself it its itself they them their theirs themselves what which who whom this that
    these those am is are was were be been being have has had having do does did doing a an the and
    but if or because as until while of at by for with about against between into through during
    before after above below to from up down in out on off over under again further then once here
    there when where why how all any both each few more most other some such no nor not only own
    same so than too very can will just don should now
    s t d ll m o re ve y ain aren couldn didn doesn hadn hasn haven isn ma mightn mustn needn shan
    shouldn wasn weren won wouldn
    """
)

# The pronouns that `count:pronouns` counts
PRONOUNS = _read_words(
    """
    i me we us you he him she her it they them
    my mine our ours your yours his hers its their theirs
    myself ourselves yourself yourselves himself herself itself themselves
    this that these those who whom whose which what whoever whomever whatever whichever
    anybody anyone anything everybody everyone everything nobody nothing somebody someone something
    each either neither both all some any none
    """
)

# -- syllables

# Words with one syllable fewer than groups of vowels
FEWER_SYLLABLES = _read_words(
    """
    absolutely achieved achievement acquired added addressed advanced advertisement aged allowed
    announced announcement apparently armed arrangement arrived asked assumed attached
    authorized awareness awesome balanced barely baseball based basement believed believes
    besides bigger biggest business called captured careful caused changed changing charged
    charles checked closed clothes combined comes compared composed concerned confirmed
    considered constantly contained controlled convinced covered dancing dates declared defined
    definitely derived described designed desired detailed determined developed dining
    discovered discussed drives dropped earned embarrassed encouraged encouraging engaged
    engagement enhanced entirely equipped essentially established estimated evening every
    everybody everything everywhere excitement exclaimed existing expected exposed extremely
    failed featured filed files filled finished fireplace firmly fixed focused forced forehead
    formed framed frames games genes getting gives giving gloves grabbed grades grateful
    greatest guides happened harder having helped higher highest holes homeless homes homework
    hopefully household improved improvement including increased increasingly induced informed
    inspired installed introduced invented involved james joined jokes jones killed lakes
    largely larger largest lately launched learned leaves licensed lifestyle lifetime liked
    likely likewise lines linked lived lives lonely longer looked loved lovely loves machines
    makes managed management manufacturing marked measured measurement merely miles missed mixed
    modes moved movement moves named names nearest notebook notes noticed observed occurred ones
    opened openly opposed ordered organized ourselves owned partially passed peaceful phones
    picked placed placement planned plates pleased preferred prepared printed processing
    produced progressed promised properly proposed purchased putting raised rapidly rarely rates
    reached received recently recognized reduced referred refused relatively released remaining
    removed replaced replacement required requirement requirements reserved respectively retired
    retirement revised roles roughly rubbed rules safety sales saved scared scenes scores sealed
    seemed selected served serves shared shares sharply shaved shipped shooting showed sides
    signed similarly sites slightly slipped smaller softly solely somehow something somewhat
    somewhere spending stared starting statement statements states steadily stepped stones
    stopped stored stores stronger styles substantially successfully suddenly supposed surely
    surprised surrounded takes tales testing themes themselves therefore tightly times tired
    tones trading trained treated turned types used useful using viewed votes voting warehouse
    waves whispered widely wireless worked wrapped writes
    """
)

# Words with one syllable more than groups of vowels
MORE_SYLLABLES = _read_words(
    """
    actual actually agree alliance annual anxiety anyone appliances applying appreciate
    appreciation appropriate area argue associate association audience audio avenue bacteria
    barrier being beyond bias biography biological biology buying cafe carrier carrying casual
    champion chaos client coalition coffee columbia committee compliance continue continuous
    cooperate cooperation cooperative coordinate create created creating creation creative
    creativity creator criteria cruel curiosity curious degree denial diagram dial dialogue
    diameter diet disagree doing dual dying easier editorial employees enthusiasm european
    evaluate evaluation experience experiences february fluid flying fuel genuine geographic
    geography giant going graduate graduation guarantee guardian hawaii historian idea ideal
    ideas ideological ideology immediate india indian individual individuals industrial
    influence influential ingredient initiate initiative intellectual interior intermediate
    israel issue january layer layers layout liability liable linear lion louis loyal loyalty
    lying manual maria material materials maybe mayor media medium memorial miami movie museum
    mutual mysterious negotiate negotiation nuclear obvious ohio orientation paying period piano
    pioneer player playing poem poems poet poetry premium previous prior priorities priority
    pursue quiet radiation radio react reaction real realistic reality realize really recipe
    recipient recreation refugee reliable rescue revenue riot ritual royal ruin ryan samuel
    saying science scientific scientist scientists seeing serial serious seriously situation
    skiing society sodium soviet spiritual stadium statue stereo studio suicide superior
    taxpayer tennessee theater theological theology theoretical theory tissue trial triumph
    trying unusual usual vacuum value variable variation variety various victoria video violate
    violation violence violent virtual virtually virtue visual warrior wyoming
    """
)

# -- verbs

# Verbs in their base form; forms in -s, -ed and -ing are derived
VERBS = _read_words(
    """
    accept access accompany accomplish achieve acknowledge acquire act adapt add address adjust
    admire admit adopt advance advise affirm afford agree aim align allow alternate amplify analyse
    analyze announce answer anticipate apologize appear apply appoint appreciate approach approve
    arrange arrive articulate ask assemble assert assess assign assist assume assure attach attack
    attempt attend amend attract avoid awake await balance ban base bathe be bear beat become beg begin behave
    believe belong bend blend bless blink blow boil boost borrow bounce brainstorm break breathe brew bring
    broaden brush build burn bury buy bypass calculate call calm capture care carry carve cast catch
    categorize cause celebrate challenge change characterize chase check cheer choose chop cite
    claim clarify clean clear click climb close coat collaborate collect combine come comfort
    commit communicate compare compete compile complain complete compose compress compute
    concentrate conclude conduct confess confirm confront confuse connect consider consist construct
    consult consume contact contain continue contribute control convert convey convince cook cope
    copy correct cost count cover craft create criticize cross cry cultivate cut dance dare deal debug
    decide declare decline decorate decrease dedicate deepen defend define delay delegate delete
    deliver demand demonstrate deny depend deploy describe deserve design desire destroy detail
    detect determine develop devise dig direct disagree disappear discard discover discuss dive
    divide document double download draft drain draw dream dress drink drive drop drown earn ease
    eat edit educate elaborate eliminate embark embody embrace emerge emphasize employ empower
    enable encourage end endure engage enhance enjoy ensure enter entertain escape establish
    estimate evaluate examine exclude execute exercise exist expand expect experience experiment
    explain explore export expose express extend extract face facilitate fail fall familiarize
    feed feel fetch fight figure fill filter find finish fit fix flip float flow fly focus fold
    follow forget forgive form formulate foster freeze fry gain garnish gather gauge generate get
    give glance glow go grab grant grasp greet grill grind grow guarantee guess guide handle hang
    happen harness hate have heal hear heat help hesitate hide highlight hire hit hold honor hope
    host hug identify ignite ignore illuminate illustrate imagine implement imply import improve
    include incorporate increase indicate indulge influence inform infuse inherit initialize
    initiate insert insist inspect inspire install integrate intend interact interpret interview
    introduce invent invest investigate invite involve iterate join judge jump justify keep kick
    kill kiss knock know label laugh launch lay lead leap learn leave lend level leverage lie
    lift light like limit linger link list listen live load locate lock log look lose love lower
    maintain make manage map march mark master match maximize mean measure meet melt memorize
    mention merge minimize miss mix model modify monitor motivate mount move multiply narrate
    navigate need negotiate nod note notice notify nourish nurture obey observe obtain occur offer
    open operate optimize order organize outline overcome own pack paint participate pass pause pay peel
    perceive perform permit persist persuade pick place plan plant play point ponder pose
    position possess post pour practice praise pray predict prefer preheat prepare present preserve
    press pretend prevent prioritize proceed process produce program prohibit project promise
    promote prompt pronounce propose protect prove provide publish pull purchase pursue push put
    qualify question quit quote raise reach react read realize rearrange reassure rebuild recall
    receive recite recognize recommend reconsider record recover recycle reduce refer refine
    reflect refrain refuse regard register regret reinforce reject relate relax release rely remain
    remember remind remove rename render repeat replace reply report represent request require
    research resist resolve respect respond rest restart restore restrict result resume retain
    retell rethink retrieve return reveal reverse review revise reward rewrite ride ring rinse rise
    risk roll rotate run rush sail satisfy save say scale scan scatter schedule scroll search
    season secure see seek seem select sell send sense separate serve set settle shake shape share
    shift shine shoot shop shout show shrink shut sign simmer simplify simulate sing sink sit
    sketch skip sleep slice slide slow smell smile smooth soar solve sort spark speak specify spell
    spend spin split spread spring sprinkle squeeze stand stare start state stay steer step stick
    stir stop store strengthen stretch strive structure struggle study submit subscribe subtract
    succeed suffer suggest suit summarize supply support suppose surround survive suspect sustain
    swallow swap swim switch synthesize tackle take talk taste teach tear tell tend test thank
    think thrive throw tie toss touch track trade train transfer transform translate travel treat
    trust try turn type uncover understand undertake unfold unite unleash unlock unveil update
    upgrade upload urge use utilize validate value vary venture verify view visit visualize wait
    wake walk wander want warm warn wash watch wear weave weigh welcome whip whisk whisper wipe wish
    witness wonder work worry wrap write yell yield
    """
)

# Finite verbs and participles that no rule derives from `VERBS`
FINITE_VERBS = _read_words(
    """
    am is are was were been being has had having does did done doing goes went gone made said told
    took taken came gave given got gotten found thought knew known saw seen left felt kept held
    brought bought began begun wrote written stood heard meant met paid ran sat spoke spoken led
    grew grown lost do let fell fallen sent built understood drew drawn broke broken spent rose risen drove
    driven wore worn chose chosen sought ate eaten dealt hung taught threw thrown caught sang sung
    sank slept sold shook shaken shone shot woke born bound forgotten forgave forgiven frozen hidden
    hid lain laid rode ridden shown swam torn tore won fought flew flown
    """
)

# Words that look like forms of verbs, or are verbs, but are tagged otherwise at the beginning
NOT_VERBS = _read_words(
    """
    during nothing something anything everything morning evening king spring string thing wing ring
    ceiling wedding sibling darling pudding red bed indeed speed seed hundred kindred sacred naked
    wicked species news yes its his this thus bus gas less unless across as
    like open close clean clear calm warm slow smooth light level last own present live correct
    complete separate double lower secure well even alternate elaborate
    experience practice research project program place time water
    """
)

# Second words after which an ambiguous first word is a noun
NOUN_FIRST = _read_words(
    """
    is are was were has had have can could will would may might must shall should does did and or
    of 's
    """
)
