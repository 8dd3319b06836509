// What people look for first: a page that says how, then the entry of a name, then why it is so and what has changed.
var Scorer = (() => {
  const asked = (new URLSearchParams(window.location.search).get("q") || "").trim();
  const words = asked.toLowerCase().split(/\s+/);
  const isCode = /[A-Z_.]/.test(asked); // RMSNorm, from_pretrained
  const name = (text) => text.split(".").pop();
  return {
    score: ([page, title, anchor, description, score]) => {
      if (/^(guides\/|models$|start|coming-from|glossary|notebooks\/|cards\/)/.test(page)) score += 12;
      // "gemma" and "load gemma" ask for the cards of Gemma, Gemma 2, ...
      if (page.startsWith("cards/") && words.includes(title.toLowerCase().split(/[\s-]/)[0])) return score + 25;
      if (isCode && page.startsWith("api/objects/") && name(title) === name(asked)) return score + 40;
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
})();
