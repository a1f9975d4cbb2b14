// The search runs in a worker, which browsers refuse to pages from file://. There, a hidden frame takes its place.
// The offline plugin would load another script from the network, were there none with "iframe-worker" in its name.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const base = new URL(url, location.href);
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      const inside = frame.contentWindow;
      const load = (source) =>
        new Promise((resolve, reject) => {
          const script = inside.document.createElement("script");
          script.src = new URL(source, base);
          script.onload = resolve;
          script.onerror = reject;
          inside.document.head.append(script);
        });
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      inside.importScripts = async (...sources) => {
        for (const source of sources) await load(source);
      };
      this.frame = frame;
      this.loaded = load(base);
    }

    async postMessage(data) {
      await this.loaded;
      const inside = this.frame.contentWindow;
      inside.dispatchEvent(new inside.MessageEvent("message", { data }));
    }

    terminate() {
      this.frame.remove();
    }
  };
}
