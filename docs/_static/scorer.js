// What people look for first: a page that says how, then the entry of a name, then why it is so and what has changed.
var Scorer = {
  score: ([page, title, anchor, description, score]) => {
    if (/^(guides\/|models$|start|coming-from|glossary|notebooks\/)/.test(page)) return score + 12;
    if (page.startsWith("api/objects/") && !description) return score - 12; // the object itself is a result, too
    if (/^(decisions\/|changelog|contributing)/.test(page)) return score - 15;
    return score;
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
