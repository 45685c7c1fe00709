// Sends a message of the chat and shows the answers while they are given. All text of models is set as text, never as HTML.
"use strict";
(() => {
  const form = document.getElementById("say");
  const live = document.getElementById("live");
  const problem = document.getElementById("problem");
  const SHOWN = 100000; // characters of an answer that are shown while it is given

  function pane(side, sides) {
    if (!sides[side]) {
      const card = document.createElement("div");
      const text = document.createElement("div");
      card.className = "card";
      text.className = "text";
      text.dir = "auto";
      card.append(text);
      live.append(card);
      sides[side] = { text, length: 0 };
    }
    return sides[side];
  }

  function show(event, sides) {
    if (event.error) {
      problem.textContent = event.error;
      return false;
    }
    const target = pane(event.side, sides);
    if (target.length < SHOWN) target.text.append(event.text.slice(0, SHOWN - target.length));
    target.length += event.text.length;
    return true;
  }

  async function ask() {
    const reply = await fetch(form.action, {
      method: "POST", headers: { "HX-Request": "true" }, body: new URLSearchParams(new FormData(form)),
    });
    if (reply.status === 401) location.reload();
    if (!reply.ok) {
      problem.textContent = new DOMParser().parseFromString(await reply.text(), "text/html").body.textContent.trim();
      return false;
    }
    const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
    const sides = {};
    let rest = "", complete = true;
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return complete;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) complete = show(JSON.parse(line), sides) && complete;
    }
  }

  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const button = form.querySelector("button");
    button.disabled = true;
    problem.textContent = "";
    live.replaceChildren();
    try {
      // the question stays in its field if an answer failed
      if (await ask()) form.reset();
      await htmx.ajax("GET", location.pathname, { target: "#talk", select: "#talk", swap: "outerHTML" });
      live.replaceChildren();
    } catch (error) {
      problem.textContent = "The connection to the page was lost. Reload it and send your message again.";
    } finally {
      button.disabled = false;
    }
  });
})();
