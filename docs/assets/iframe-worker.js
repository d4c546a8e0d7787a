/* Search in pages that are opened from a disk: browsers refuse workers there, so the worker's script runs in a hidden frame. */
if (location.protocol === "file:") {
  const load = (place, address) =>
    new Promise((done, fail) => {
      const script = place.document.createElement("script");
      Object.assign(script, { src: address, onload: done, onerror: fail });
      place.document.head.append(script);
    });

  window.Worker = class extends EventTarget {
    constructor(address) {
      super();
      const frame = document.createElement("iframe");
      Object.assign(frame, { hidden: true, srcdoc: "<!doctype html>" });
      this.frame = frame;
      this.place = new Promise((ready) => {
        frame.onload = async () => {
          const place = frame.contentWindow;
          place.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
          place.importScripts = async (...addresses) => {
            for (const each of addresses) await load(place, each);
          };
          await load(place, address);
          ready(place);
        };
      });
      document.body.append(frame);
    }

    postMessage(data) {
      this.place.then((place) => place.dispatchEvent(new MessageEvent("message", { data })));
    }

    terminate() {
      this.frame.remove();
    }
  };
}
