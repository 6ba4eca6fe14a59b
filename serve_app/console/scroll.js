// Keeps the end of a growing box visible, unless the user has scrolled away from it.

const NEAR_PX = 60;

export class Scroll {
  /** `button` scrolls to the end. */
  constructor(box, button) {
    this.box = box;
    this.button = button;
    this.follows = true;
    box.addEventListener("scroll", () => this.look(), { passive: true });
    button.addEventListener("click", () => this.toEnd());
    const grown = new ResizeObserver(() => this.keep());
    grown.observe(box);
    new MutationObserver(() => {
      grown.disconnect();
      grown.observe(box);
      for (const child of box.children) grown.observe(child);
    }).observe(box, { childList: true });
  }

  look() {
    const { scrollHeight, scrollTop, clientHeight } = this.box;
    this.follows = scrollHeight - scrollTop - clientHeight < NEAR_PX;
    this.button.hidden = this.follows;
  }

  keep() {
    if (this.follows) this.box.scrollTop = this.box.scrollHeight;
    else this.look();
  }

  toEnd() {
    this.follows = true;
    this.keep();
    this.look();
  }
}
