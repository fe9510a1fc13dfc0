// Draws the diagrams of a page (fences named "mermaid"), in the colours of the page. The library is
// this site's own copy, and is loaded only where a page has a diagram. Without scripts the page
// shows the diagram's text.

(() => {
  "use strict";

  const folder = document.currentScript.src.replace(/[^/]*$/, "");
  let library = null;
  let count = 0;

  const load = () => {
    library ??= new Promise((resolve, reject) => {
      const script = document.createElement("script");
      script.src = `${folder}mermaid.tiny.js`;
      script.onload = () => resolve(window.mermaid);
      script.onerror = () => reject(new Error("the diagram library could not be loaded"));
      document.head.append(script);
    });
    return library;
  };

  const settings = () => {
    const css = getComputedStyle(document.body);
    const colour = (name) => css.getPropertyValue(name).trim();
    return {
      startOnLoad: false,
      securityLevel: "strict",
      theme: "base",
      fontFamily: css.fontFamily,
      themeVariables: {
        darkMode: document.body.dataset.mdColorScheme === "slate",
        background: colour("--md-default-bg-color"),
        fontFamily: css.fontFamily,
        fontSize: "15px",
        textColor: colour("--md-default-fg-color"),
        lineColor: colour("--md-default-fg-color--light"),
        primaryColor: colour("--course-info-bg"),
        primaryBorderColor: colour("--course-info"),
        primaryTextColor: colour("--md-default-fg-color"),
        secondaryColor: colour("--course-care-bg"),
        secondaryBorderColor: colour("--course-care"),
        secondaryTextColor: colour("--md-default-fg-color"),
        tertiaryColor: colour("--course-quiet-bg"),
        tertiaryBorderColor: colour("--course-rule"),
        tertiaryTextColor: colour("--md-default-fg-color"),
        noteBkgColor: colour("--course-care-bg"),
        noteBorderColor: colour("--course-care"),
        noteTextColor: colour("--md-default-fg-color"),
        edgeLabelBackground: colour("--md-default-bg-color"),
      },
    };
  };

  // `blocks`: those of this page that still show text, or all of them after a change of colours.
  const draw = async (blocks) => {
    if (!blocks.length) return;
    const mermaid = await load();
    mermaid.initialize(settings());
    for (const block of blocks) {
      const text = block.dataset.source ?? block.textContent;
      const { svg } = await mermaid.render(`diagram-${++count}`, text);
      const drawn = document.createElement("div");
      drawn.className = "diagram";
      drawn.dataset.source = text;
      drawn.innerHTML = svg;
      const picture = drawn.querySelector("svg");
      picture.setAttribute("role", "img");
      if (!picture.hasAttribute("aria-labelledby")) picture.setAttribute("aria-label", "Diagram");
      // On a narrow screen a wide diagram keeps letters that can be read, and scrolls in its box.
      picture.style.minWidth = `${0.75 * parseFloat(picture.style.maxWidth)}px`;
      block.replaceWith(drawn);
      if (drawn.scrollWidth > drawn.clientWidth) drawn.tabIndex = 0;
    }
  };

  const all = () => draw([...document.querySelectorAll(".md-content .diagram")]);
  const fresh = () => draw([...document.querySelectorAll(".md-content pre.diagram")]);

  if (typeof document$ !== "undefined") document$.subscribe(fresh);
  else if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", fresh);
  else fresh();

  new MutationObserver(all).observe(document.body, { attributeFilter: ["data-md-color-scheme"] });
})();
