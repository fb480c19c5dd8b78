// Client-side health checks (gRFC A17), which @grpc/grpc-js does not have. This load balancing policy watches the health of each
// server, and sends calls in turn to the healthy servers. Import the module once, and name the policy in the service config:
//
//   loadBalancingConfig: [{ watched_round_robin: { serviceName: "" } }]
import { Client, Metadata, connectivityState, credentials, experimental, status } from "@grpc/grpc-js";
import type { ClientReadableStream, ServiceError } from "@grpc/grpc-js";

export const POLICY = "watched_round_robin";

const CHILD = [{ round_robin: {} }];
const WATCH = "/grpc.health.v1.Health/Watch";
const SERVING = 1;
const RETRY_MS = 1_000;

type Helper = ConstructorParameters<typeof experimental.ChildLoadBalancerHandler>[0];
type Listener = Parameters<experimental.SubchannelInterface["addConnectivityStateListener"]>[0];

class Config implements experimental.TypedLoadBalancingConfig {
  constructor(readonly serviceName: string) {}
  static createFromJson({ serviceName }: { serviceName?: unknown }): Config {
    if (typeof serviceName !== "string") throw new Error(`${POLICY}.serviceName must be a string`);
    return new Config(serviceName);
  }
  getLoadBalancerName(): string {
    return POLICY;
  }
  toJsonObject(): object {
    return { [POLICY]: { serviceName: this.serviceName } };
  }
}

// A server and its health. A server counts as unhealthy until it has reported that it is healthy.
class Watched extends experimental.BaseSubchannelWrapper {
  private watch: ClientReadableStream<number> | undefined;
  private retry: NodeJS.Timeout | undefined;

  constructor(
    readonly unwrapped: experimental.SubchannelInterface,
    private readonly serviceName: string,
  ) {
    super(unwrapped);
    this.setHealthy(false);
    unwrapped.addConnectivityStateListener(this.follow);
    if (unwrapped.getConnectivityState() === connectivityState.READY) this.start();
  }

  private readonly follow: Listener = (_, __, state) => {
    this.stop();
    if (state === connectivityState.READY) this.start();
  };

  private start(): void {
    const options = { channelOverride: this.unwrapped.getChannel() };
    const client = new Client(this.getAddress(), credentials.createInsecure(), options);
    const watch = client.makeServerStreamRequest<string, number>(WATCH, request, reply, this.serviceName, new Metadata());
    this.watch = watch;
    watch.on("data", (said: number) => this.setHealthy(said === SERVING));
    watch.on("error", (error: ServiceError) => {
      if (this.watch !== watch) return;
      // A server without a health service counts as healthy. If the health stream broke, it is opened again.
      this.setHealthy(error.code === status.UNIMPLEMENTED);
      if (error.code !== status.UNIMPLEMENTED) this.retry = setTimeout(() => this.start(), RETRY_MS).unref();
    });
  }

  private stop(): void {
    clearTimeout(this.retry);
    this.watch?.cancel();
    this.watch = undefined;
    this.setHealthy(false);
  }

  protected override destroy(): void {
    this.unwrapped.removeConnectivityStateListener(this.follow);
    this.stop();
  }
}

// HealthCheckRequest { string service = 1; } and HealthCheckResponse { ServingStatus status = 1; }
function request(serviceName: string): Buffer {
  const name = Buffer.from(serviceName);
  if (name.length > 127) throw new Error(`${POLICY}.serviceName is longer than 127 bytes`);
  return name.length ? Buffer.concat([Buffer.from([0x0a, name.length]), name]) : name;
}

function reply(message: Buffer): number {
  return message[0] === 0x08 ? (message[1] ?? 0) : 0;
}

class WatchedRoundRobin implements experimental.LoadBalancer {
  private readonly child: experimental.ChildLoadBalancerHandler;
  private serviceName = "";

  constructor(helper: Helper) {
    this.child = new experimental.ChildLoadBalancerHandler(
      experimental.createChildChannelControlHelper(helper, {
        createSubchannel: (address, options) => new Watched(helper.createSubchannel(address, options), this.serviceName),
        updateState: (state, picker, message) => helper.updateState(state, unwrapping(picker), message),
      }),
    );
  }

  updateAddressList(
    ...[endpoints, config, options, note]: Parameters<experimental.LoadBalancer["updateAddressList"]>
  ): boolean {
    this.serviceName = (config as Config).serviceName;
    const child = experimental.selectLbConfigFromList(CHILD);
    if (child === null) throw new Error("@grpc/grpc-js has no round_robin");
    return this.child.updateAddressList(endpoints, child, options, note);
  }

  exitIdle(): void {
    this.child.exitIdle();
  }
  resetBackoff(): void {
    this.child.resetBackoff();
  }
  destroy(): void {
    this.child.destroy();
  }
  getTypeName(): string {
    return POLICY;
  }
}

// The channel expects its own subchannels, without wrappers.
function unwrapping(picker: experimental.Picker): experimental.Picker {
  return {
    pick(args) {
      const picked = picker.pick(args);
      return picked.subchannel instanceof Watched ? { ...picked, subchannel: picked.subchannel.unwrapped } : picked;
    },
  };
}

experimental.registerLoadBalancerType(POLICY, WatchedRoundRobin, Config);
