import itertools, sys, time, traceback
sys.path.insert(0, "scratch")
from worlds import *
from norms import VARIANT, VARIANTS
from specdec.ops.compiling.rehearsal import Rehearsals
from specdec.ops.products.linear import with_tiles
START = time.time()
def log(*a): print(f"[{time.time()-START:6.1f}]", *a, flush=True)
WHOLE, HALF = 229_000, 112_000

def candidates(T, product):
    O, I, gated = PRODUCTS[product]
    bt = 48 if 32 < T <= 48 else max(8, 1 << (T - 1).bit_length())
    found = []
    for bo in (64, 128):
        tiles = O // bo
        for bi in ((128, 256) if T <= 8 else (64, 128)):
            if bo == 64: splits = {"qkv": (1, 2), "o": (1, 2, 4), "down": (2, 4), "gu": (1,)}[product]
            else: splits = {"qkv": (2, 4, 5), "o": (4, 8), "down": (4, 8), "gu": (1,)}[product]
            for s in splits:
                rooms = (WHOLE, HALF) if tiles * s <= 132 else (HALF,)
                if product == "gu": rooms = (HALF,) if bo == 64 else (WHOLE, HALF)
                if product == "o" and bo == 64 and s == 2: rooms = (WHOLE, 190_000, 150_000, HALF)
                for room in rooms:
                    stage = (bo + bt) * bi * 2
                    st = min(12, room // stage)
                    if st < 2: continue
                    for w in ((4,) if bo == 64 else (4, 8)):
                        if bo == 128 and w == 8 and T <= 8: continue
                        found.append(ProductTiles(bt, bo, bi, s, w, st, lag=0 if T <= 16 else 1))
    if product == "gu" and T > 8:
        for bi in (64, 128):
            found.append(ProductTiles(bt, 256, bi, 1, 8, WHOLE // ((256 + bt) * bi * 2), lag=1))
    if T <= 8: found = [f for f in found if f.block_o == 64]
    return list(dict.fromkeys(found))

PAGED_CANDS = {
 "plain1": [(PagedTiles(16, bn, 4, st, least=bn), s) for bn, ss in ((32, (16, 33)), (64, (16, 33)), (128, (9,))) for st in (1, 2, 3) for s in ss],
 "chain1": [(PagedTiles(32, bn, w, st, least=bn), s) for bn, ss in ((32, (16, 33)), (64, (16, 33)), (128, (16,))) for st in (2, 3) for w in (4, 8) for s in ss],
 "chain32k": [(PagedTiles(32, bn, w, st, least=128), s) for bn, sts in ((32, (3, 4, 6)), (64, (2, 3, 4)), (128, (2, 3))) for st in sts for w in (4, 8) for s in (16, 33)] + [(PagedTiles(32, 32, 4, 3, least=128), 49)],
 "plain32k": [(PagedTiles(16, bn, w, st, least=128), s) for bn, sts in ((32, (4, 6)), (64, (2, 3, 4)), (128, (2, 3))) for st in sts for w in (4,) for s in (16, 33)] + [(PagedTiles(16, 32, 4, 3, least=128), 49), (PagedTiles(16, 64, 2, 3, least=128), 33)],
 "plain32": [(PagedTiles(16, bn, w, st), s) for bn, sts in ((32, (4, 6)), (64, (3, 4, 5))) for st in sts for w in (2, 4) for s in (1,)] + [(PagedTiles(16, 64, 4, 3), 2), (PagedTiles(16, 32, 4, 4), 2)],
 "chain8": [(PagedTiles(32, bn, w, st), s) for bn, sts in ((32, (3, 4)), (64, (2, 3, 4)), (128, (2, 3))) for st in sts for w in (4,) for s in (2, 4)],
 "tree32": [(PagedTiles(64, bn, 4, st), s) for bn, sts in ((64, (1, 2, 3)), (128, (1, 2))) for st in sts for s in (7, 8, 15, 16)] + [(PagedTiles(128, 64, 8, st), s) for st in (1, 2, 3) for s in (9, 16)],
 "tree8": [(PagedTiles(32, bn, 4, st, least=bn), s) for bn, ss in ((32, (16, 33)), (64, (15, 33)), (128, (9, 15))) for st in (1, 2) for s in ss],
 "tree60": [(PagedTiles(64, bn, 4, st), s) for bn, sts in ((64, (1, 2)), (128, (1, 2))) for st in sts for s in (3, 4, 7, 8)] + [(PagedTiles(128, 64, 8, st), s) for st in (2, 3) for s in (8, 9)],
}

def main():
    with torch.inference_mode():
        model = make_model()
        log("model")
        worlds = {
            "plain1": World(model, "chain", 1, 1100, 1), "chain1": World(model, "chain", 1, 1100, 6),
            "tree32": World(model, "tree", 1, 1100, 32), "tree60": World(model, "tree", 1, 1100, 60, 8), "tree8": World(model, "tree", 1, 1100, 8, 4),
            "chain8": World(model, "chain", 8, 1100, 6), "plain32": World(model, "chain", 32, 1100, 1),
            "chain32k": World(model, "chain", 1, 32800, 6), "plain32k": World(model, "chain", 1, 32800, 1),
        }
        log("worlds")
        rows = {"tree32": 32, "tree60": 60, "chain8": 48, "chain1": 6}
        rehearsals = Rehearsals(DEV)
        waits = [rehearsals.rehearse(w.few) for w in worlds.values()]
        layer = model.layers[0]
        weights = {"qkv": layer.self_attn.qkv_proj.weight, "o": layer.self_attn.o_proj.weight, "gu": layer.mlp.gate_up_proj.weight, "down": layer.mlp.down_proj.weight}
        n = 0
        for T in rows.values():
            for product, (O, I, gated) in PRODUCTS.items():
                x = torch.randn(T, I, device=DEV, dtype=torch.bfloat16)
                for c in candidates(T, product):
                    waits.append(rehearsals.rehearse(partial(with_tiles, x, weights[product], gated, c))); n += 1
        for name, cands in PAGED_CANDS.items():
            for JOIN[0] in (False, True) if "tree" in name else (False,):
                for c in [None, *cands]:
                    PAGED[0] = c
                    waits.append(rehearsals.rehearse(worlds[name].few)); n += 1
        JOIN[0] = False
        PAGED[0] = None
        for VARIANT[0] in VARIANTS:
            waits.append(rehearsals.rehearse(worlds["chain1"].few)); n += 1
        VARIANT[0] = None
        for w in worlds.values():
            DEFER[0] = True
            try: waits.append(rehearsals.rehearse(w.few)); n += 1
            except Exception: traceback.print_exc()
        DEFER[0] = False
        head = torch.randn(128256, 4096, device=DEV, dtype=torch.bfloat16) * 0.02
        def of_head(T):
            bt = 48 if 32 < T <= 48 else max(8, 1 << (T - 1).bit_length())
            for bo, bi, w, room in ((64, 128, 4, HALF), (64, 64, 4, HALF), (64, 128, 4, WHOLE), (128, 64, 4, HALF), (128, 64, 8, HALF), (128, 128, 4, WHOLE), (128, 64, 4, WHOLE), (128, 64, 8, WHOLE), (128, 128, 8, WHOLE), (256, 64, 8, WHOLE)):
                yield ProductTiles(bt, bo, bi, 1, w, min(12, room // ((bo + bt) * bi * 2)), lag=1)
        for T in (32, 48, 60):
            x = torch.randn(T, 4096, device=DEV, dtype=torch.bfloat16)
            for c in of_head(T):
                waits.append(rehearsals.rehearse(partial(with_tiles, x, head, False, c))); n += 1
        log("candidates", n)
        rehearsals.begin()
        for w in waits[:8]: w()
        log("defaults compiled")
        waited = iter(waits)
        for w in waits: w()
        log("all compiled")
        for name, w in worlds.items():
            try:
                us = [w.us() for _ in range(3)]
                log(name, w.name, "us a layer", " ".join(f"{u:.2f}" for u in us))
                timeline(w)
            except Exception: traceback.print_exc()
        for name, world in worlds.items():
            try:
                base = world.us(21); ref = world.out.float()
                DEFER[0] = True
                us = world.us(21)
                log(name, f"norms deferred: {base:.2f} -> {us:.2f}, off by {float((world.out.float() - ref).norm() / ref.norm()):.1e}")
                timeline(world)
            except Exception: traceback.print_exc()
            DEFER[0] = False
        for name in ("plain1", "chain1", "tree32", "chain8"):
            world, found = worlds[name], []
            base = world.us(); ref = world.out.float()
            for VARIANT[0] in VARIANTS:
                us = world.us(21); found.append((us, VARIANT[0], float((world.out.float() - ref).norm() / ref.norm())))
            VARIANT[0] = None
            found.sort()
            log(name, f"norm (warps, when, early x): default {base:.2f} {world.us(21):.2f}", "; ".join(f"{u:.2f} {v}{'' if e < 1e-2 else ' WRONG'}" for u, v, e in found))
            VARIANT[0] = found[0][1]; timeline(world); VARIANT[0] = None
        for T in (2, 3, 4, 8, 12, 16, 24):
            w = World(model, "chain", 1, 1100, T)
            log(f"chain of {T}: {w.us():.2f}")
            if T in (2, 8, 16): timeline(w)
        best_products = {}
        for name, T in rows.items():
            world = worlds[name]
            for product, (O, I, gated) in PRODUCTS.items():
                x = torch.randn(T, I, device=DEV, dtype=torch.bfloat16)
                want = x.float() @ weights[product].float().T
                if gated:
                    a, b = want.chunk(2, -1); want = torch.nn.functional.silu(a) * b
                base, found = world.us(), []
                for c in candidates(T, product):
                    try:
                        err = float((with_tiles(x, weights[product], gated, c).float() - want).norm() / want.norm())
                        OVER[O, I] = c
                        found.append((world.us(), err, c))
                    except Exception as e:
                        print("   failed", short(c), str(e)[:100])
                    OVER.clear()
                again = world.us()
                found.sort(key=lambda f: f[0])
                log(name, product, f"default {base:.2f} {again:.2f} {short(_plain_tiles(None and 0, T, O, I, torch.bfloat16, gated, linear_module.match_of(DEV).kind)) if False else ''}", "; ".join(f"{u:.2f} {short(c)}{'' if e < 1e-2 else ' WRONG %.1e' % e}" for u, e, c in found[:9]), "| worst", f"{found[-1][0]:.2f}")
                best_products[name, product] = [f for f in found if f[1] < 1e-2][0]
            base = world.us()
            for product, (O, I, gated) in PRODUCTS.items():
                OVER[O, I] = best_products[name, product][2]
            log(name, f"all best products: {base:.2f} -> {world.us():.2f}")
            timeline(world)
            try:
                DEFER[0] = True
                log(name, f"all best products, norms deferred: {world.us():.2f}")
                timeline(world)
            except Exception: traceback.print_exc()
            DEFER[0] = False
            OVER.clear()
        for name, cands in PAGED_CANDS.items():
            world, found = worlds[name], []
            PAGED[0] = None
            base = world.us(); ref = world.out.float()
            ks = [p for p in PRODUCTS if (name, p) in best_products]
            for p in ks: OVER[PRODUCTS[p][:2]] = best_products[name, p][2]
            base2 = world.us()
            for JOIN[0] in (False, True) if "tree" in name else (False,):
                for c in [None, *cands]:
                    PAGED[0] = c
                    try:
                        us = world.us(); err = float((world.out.float() - ref).norm() / ref.norm())
                        found.append((us, err, c or (PagedTiles(0, 0, 0, 0), 0), JOIN[0]))
                    except Exception as e:
                        print("   failed", c, JOIN[0], str(e)[:100])
            JOIN[0] = False
            PAGED[0] = None
            again = world.us()
            found.sort(key=lambda f: f[0])
            log(name, f"paged default {base:.2f}, with best products {base2:.2f} {again:.2f}", "; ".join(f"{u:.2f} ({t.block_m},{t.block_n},w{t.warps},st{t.stages},x{s}){' JOIN' if j else ''}{'' if e < 3e-2 else ' WRONG %.1e' % e}" for u, e, (t, s), j in found[: 16 if "tree" in name else 10]), "| worst", f"{found[-1][0]:.2f}")
            if found:
                PAGED[0], JOIN[0] = found[0][2] if found[0][2][1] else None, found[0][3]
                timeline(world)
                # the o product beside these tiles of attention
                T = rows.get(name)
                if T:
                    O, I, gated = PRODUCTS["o"]
                    old, more = OVER.get((O, I)), []
                    for c in candidates(T, "o"):
                        OVER[O, I] = c
                        more.append((world.us(), c))
                    OVER[O, I] = old
                    more.sort(key=lambda f: f[0])
                    log(name, "o beside the best attention", "; ".join(f"{u:.2f} {short(c)}" for u, c in more[:5]))
                try:
                    DEFER[0] = True
                    log(name, f"best products, best attention, norms deferred: {world.us(21):.2f}")
                    timeline(world)
                except Exception: traceback.print_exc()
                DEFER[0] = False
            OVER.clear(); PAGED[0] = None; JOIN[0] = False
        heads = [head, head.clone()]
        for T in (32, 48, 60):
            x, found = torch.randn(T, 4096, device=DEV, dtype=torch.bfloat16), []
            want = x.float() @ head.float().T
            for c in of_head(T):
                try:
                    y = with_tiles(x, head, False, c)
                    err = float((y.float() - want).norm() / want.norm())
                    graph = torch.cuda.CUDAGraph()
                    with torch.cuda.graph(graph):
                        for w in heads * 2: with_tiles(x, w, False, c)
                    times = []
                    for _ in range(9):
                        a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                        a.record(); graph.replay(); b.record(); b.synchronize()
                        times.append(a.elapsed_time(b) * 250)
                    found.append((statistics.median(times), err, c))
                except Exception as e: print("   failed", short(c), str(e)[:100])
            log(f"head, {T} rows:", "; ".join(f"{u:.1f} {short(c)}{'' if e < 1e-2 else ' WRONG %.1e' % e}" for u, e, c in found))
        for name, w in worlds.items():
            log(name, f"default again {w.us():.2f}")
main()
