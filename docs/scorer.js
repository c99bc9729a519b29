// Scores of the search: what to do comes before how it is built, and that before how it came about.
const SCORES = [
  [/^(tutorials|guides)\//, 30],
  [/^(reference\/|install$|limits$|index$)/, 20],
  [/^(decisions\/|.*-archive$)/, -20],
  [/^lab-log$/, -10],
];

var Scorer = {
  score: ([docname, title, anchor, description, score]) => {
    const [, bonus] = SCORES.find(([pattern]) => pattern.test(docname)) ?? [null, 0];
    return score + bonus;
  },
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
