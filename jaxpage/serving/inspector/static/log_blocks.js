// Block tables, reference counts and the prefix cache of a log, by the rules of jaxpage/memory. Everything that changes is in `data`.

export class LogBlocks {
  /** The blocks of a sequence become those of a table. Behind `start` they are new; before it others have filled them. */
  setTable(sequence, table, start, back) {
    const firstNew = Math.floor(start / this.blockSize);
    const isNew = !sequence.blocks.length;
    const old = sequence.blocks;
    table.forEach((block, place) => {
      if (block === old[place] || block === 0) return;
      if (place >= firstNew || back.has(block)) this.forget(block);
      this.share(block);
    });
    old.forEach((block, place) => block !== table[place] && this.release(block));
    sequence.blocks = [...table];
    sequence.host = [];
    if (isNew) {
      const first = table.findIndex((block) => !this.data.entries.has(block));
      sequence.numCached = first < 0 ? table.length : first;
    }
  }

  blocksFor(numTokens) {
    return Math.ceil(numTokens / this.blockSize);
  }

  share(block) {
    if (block) this.data.refs[block] += 1;
  }

  release(block) {
    if (block) this.data.refs[block] -= 1;
  }

  releaseAll(sequence) {
    sequence.blocks.forEach((block) => this.release(block));
    sequence.blocks = [];
    sequence.further = [];
    sequence.numCached = 0;
  }

  trim(sequence, numTokens) {
    sequence.blocks.splice(this.blocksFor(numTokens)).forEach((block) => this.release(block));
    sequence.further.forEach((table) => table.splice(this.blocksFor(numTokens)));
    sequence.numCached = Math.min(sequence.numCached, Math.floor(numTokens / this.blockSize));
  }

  /** Puts the full blocks of a sequence into the prefix cache, if it went past the end of one since it had `before` tokens. */
  cacheIfFull(sequence, before) {
    const size = this.blockSize;
    const full = Math.floor(sequence.computed / size);
    if (!this.caches || full <= Math.floor(before / size)) return;
    const { entries, blockOf, refs } = this.data;
    for (let place = sequence.numCached; place < full; place++) {
      const block = sequence.blocks[place];
      const parent = place ? sequence.blocks[place - 1] : null;
      if (!block || (place && !entries.has(parent))) return;
      const root = place ? parent : JSON.stringify(this.data.requests.get(sequence.requestId).salt);
      const key = `${root} ${sequence.tokens.slice(place * size, (place + 1) * size).join(" ")}`;
      const known = blockOf.get(key) ?? block;
      if (known !== block && refs[block] > 1) return; // a fork has the block too
      blockOf.set(key, known);
      if (known === block) {
        entries.set(block, { key, parent, behind: [], further: sequence.further.map((table) => table[place]) });
        if (place) entries.get(parent).behind.push(block);
      } else {
        this.share(known);
        this.release(block);
        sequence.blocks[place] = known;
        entries.get(known).further.forEach((block, index) => (sequence.further[index][place] = block));
      }
      sequence.numCached = place + 1;
    }
  }

  /** A block is handed out anew: nobody finds what was in it, nor what follows it. */
  forget(block) {
    const { entries, blockOf } = this.data;
    const gone = entries.has(block) ? [block] : [];
    for (const one of gone) {
      const { key, behind } = entries.get(one);
      blockOf.delete(key);
      entries.delete(one);
      gone.push(...behind.filter((child) => entries.get(child)?.parent === one));
    }
  }
}
