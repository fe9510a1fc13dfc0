// Comfort only: the course is complete without this file, and nothing it keeps leaves the browser.
//
// 1. Progress: a box to tick at the end of a lesson, ticks beside links to lessons that are done.
// 2. A filter for the rows of tables in <div class="filterable">; what you type stays in the address.
// 3. Blocks that scroll sideways can be reached and scrolled with the keyboard, and two parts of the
//    theme get the names that screen readers need.

(() => {
  "use strict";

  const STORE = "course-done";

  // --- 1. progress ---------------------------------------------------------------------------

  const lessonOf = (url) => {
    const found = new URL(url, location.href).pathname.match(
      /\/lessons\/([\w-]+\/[\w-]+)(?:\/(?:index\.html)?|\.html)?$/
    );
    return found ? found[1] : null;
  };

  const readDone = () => {
    try {
      const list = JSON.parse(localStorage.getItem(STORE));
      return new Set(Array.isArray(list) ? list : []);
    } catch {
      return new Set(); // storage is off, or holds something that is not ours
    }
  };

  const writeDone = (done) => {
    try {
      localStorage.setItem(STORE, JSON.stringify([...done].sort()));
    } catch {
      // storage is off: the tick lasts as long as the page
    }
  };

  const showTicks = (done) => {
    for (const tick of document.querySelectorAll(".lesson-tick")) tick.remove();
    const links = document.querySelectorAll(".md-nav--primary a.md-nav__link, .units li > a");
    for (const link of links) {
      if (link.hash || !done.has(lessonOf(link.href))) continue;
      const tick = document.createElement("span");
      tick.className = "lesson-tick";
      tick.innerHTML = '<span aria-hidden="true">✓</span><span class="visually-hidden">done</span>';
      link.append(tick);
    }
  };

  const offerBox = (done) => {
    const lesson = lessonOf(location.href);
    const foot = document.querySelector(".md-content .lesson-foot");
    if (!lesson || !foot || document.querySelector(".lesson-done")) return;
    const line = document.createElement("p");
    line.className = "lesson-done";
    line.innerHTML = '<label><input type="checkbox">I have done this lesson</label>';
    const box = line.querySelector("input");
    box.checked = done.has(lesson);
    box.addEventListener("change", () => {
      const now = readDone();
      if (box.checked) now.add(lesson);
      else now.delete(lesson);
      writeDone(now);
      showTicks(now);
    });
    foot.before(line);
  };

  // --- 2. table filter -----------------------------------------------------------------------

  const offerFilter = () => {
    const blocks = [...document.querySelectorAll(".md-content .filterable")];
    if (!blocks.length || document.querySelector(".table-filter")) return;
    const line = document.createElement("div");
    line.className = "table-filter";
    line.innerHTML =
      '<label for="table-filter">Show rows with</label>' +
      '<input id="table-filter" type="search" autocomplete="off"><output role="status"></output>';
    const headingOf = (block) => {
      const before = block.previousElementSibling;
      return before && /^H[2-4]$/.test(before.tagName) ? before : null;
    };
    (headingOf(blocks[0]) || blocks[0]).before(line);

    const input = line.querySelector("input");
    const rows = blocks.map((block) => [...block.querySelectorAll("tbody tr")]);
    const apply = () => {
      const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
      let shown = 0;
      blocks.forEach((block, n) => {
        let here = 0;
        for (const row of rows[n]) {
          const text = row.textContent.toLowerCase();
          row.hidden = !words.every((word) => text.includes(word));
          here += row.hidden ? 0 : 1;
        }
        block.hidden = here === 0;
        const heading = headingOf(block);
        if (heading) heading.hidden = here === 0;
        shown += here;
      });
      const all = rows.flat().length;
      line.querySelector("output").value = words.length ? `${shown} of ${all} rows` : "";
    };
    const remember = () => {
      const url = new URL(location.href);
      if (input.value.trim()) url.searchParams.set("filter", input.value.trim());
      else url.searchParams.delete("filter");
      history.replaceState(history.state, "", url);
    };
    input.value = new URL(location.href).searchParams.get("filter") || "";
    input.addEventListener("input", () => {
      apply();
      remember();
    });
    apply();
  };

  // --- 3. access by keyboard and ear ---------------------------------------------------------

  const SCROLLERS = ".md-typeset :is(pre > code, .md-typeset__scrollwrap, table, math, .diagram)";

  const easeAccess = () => {
    document.querySelector(".md-search")?.setAttribute("aria-label", "Search");
    for (const nav of document.querySelectorAll(".md-code__nav")) nav.role = "presentation";
    for (const block of document.querySelectorAll(SCROLLERS)) {
      const style = getComputedStyle(block);
      const scrolls =
        (block.scrollWidth > block.clientWidth + 1 && /auto|scroll/.test(style.overflowX)) ||
        (block.scrollHeight > block.clientHeight + 1 && /auto|scroll/.test(style.overflowY));
      if (scrolls) block.tabIndex = 0;
      else if (block.tabIndex === 0) block.removeAttribute("tabindex");
    }
  };

  let waiting = 0;
  const later = () => {
    clearTimeout(waiting);
    waiting = setTimeout(easeAccess, 200);
  };
  addEventListener("resize", later);
  addEventListener("load", later);
  document.addEventListener("toggle", later, true); // a folded part was opened

  // --- each page, also when the theme swaps pages without loading ------------------------------

  const start = () => {
    const done = readDone();
    offerBox(done);
    showTicks(done);
    offerFilter();
    later();
  };

  if (typeof document$ !== "undefined") document$.subscribe(start);
  else if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", start);
  else start();

  addEventListener("storage", (event) => {
    if (event.key === STORE) showTicks(readDone()); // ticked in another tab
  });
})();
