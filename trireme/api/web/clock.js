// Measures how long an answer takes and how fast it comes.

export class Clock {
  constructor() {
    this.begun = performance.now();
    this.heard = this.begun; // the time of the last sign from the server, which may be a comment
    this.first = null;
    this.last = null;
    this.tokens = 0;
    this.pieces = 0;
  }

  tick() {
    this.last = this.heard = performance.now();
    this.first = this.first ?? this.last;
    this.pieces += 1;
  }

  elapsed() {
    return (performance.now() - (this.first ?? this.begun)) / 1000;
  }

  speed() {
    const made = (this.tokens || this.pieces) - 1;
    const seconds = (this.last - this.first) / 1000;
    return made > 0 && seconds > 0.05 ? made / seconds : null;
  }

  // The text while the answer comes. Before its first word, what the server does, and for how long.
  live(loading) {
    if (this.first === null) {
      const seconds = Math.floor((performance.now() - this.begun) / 1000);
      if (seconds < 2) return "";
      return performance.now() - this.heard > SILENCE ? `no sign of the server for ${Math.floor((performance.now() - this.heard) / 1000)} s` : `${loading ? "loading the model" : "reading the prompt"} · ${seconds} s`;
    }
    const speed = this.speed();
    return speed === null ? "" : `${this.tokens || this.pieces} tokens · ${speed.toFixed(1)}/s`;
  }

  told(message) {
    if (this.first === null) return "";
    const parts = [`${this.tokens || this.pieces} tokens`];
    const speed = this.speed();
    if (speed !== null) parts.push(`${speed.toFixed(1)} tokens/s`);
    parts.push(`first after ${Math.round(this.first - this.begun).toLocaleString()} ms`);
    if (message.finish === "length") parts.push("cut at the limit");
    return parts.join(" · ");
  }
}

const SILENCE = 20000; // milliseconds; a living server sends a comment every few seconds

// Draws at most once per frame, however fast tokens come.
export class Painter {
  constructor(paint) {
    this.paint = paint;
    this.due = false;
  }

  soon() {
    if (this.due) return;
    this.due = true;
    requestAnimationFrame(() => this.due && this.now());
  }

  now() {
    this.due = false;
    this.paint();
  }
}
