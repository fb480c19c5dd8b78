package io.penstock.example

import com.google.gson.Gson
import com.google.gson.reflect.TypeToken
import io.grpc.ChannelCredentials
import io.grpc.Grpc
import io.grpc.InsecureChannelCredentials
import io.grpc.ManagedChannel
import io.grpc.ManagedChannelRegistry.ProviderNotFoundException
import io.grpc.Metadata
import io.grpc.TlsChannelCredentials
import io.grpc.stub.AbstractStub
import io.grpc.stub.MetadataUtils
import io.penstock.inference.v1.InferenceServiceGrpc
import java.io.File
import java.io.IOException
import java.security.Security
import java.util.concurrent.TimeUnit

private const val MAX_MESSAGE_BYTES = 64 shl 20 // 4 MiB are too few for long log-probabilities

/**
 * A channel to host:port, or to `dns:///name:port`; it connects when the first call begins.
 *
 * A program needs only one channel, which many concurrent calls can share.
 */
internal fun openChannel(line: CommandLine): ManagedChannel {
    forgetNamesSoon()
    try {
        return Grpc.newChannelBuilder(line.address, credentials(line))
            .defaultServiceConfig(serviceConfig())
            .keepAliveTime(30, TimeUnit.SECONDS) // detects a broken connection after 40 s, also in silent streams
            .keepAliveTimeout(10, TimeUnit.SECONDS)
            .maxInboundMessageSize(MAX_MESSAGE_BYTES)
            .intercept(MetadataUtils.newAttachHeadersInterceptor(authorization()))
            .build()
    } catch (error: IllegalArgumentException) {
        throw IOException("no channel to ${line.address}: ${error.message}", error)
    } catch (error: ProviderNotFoundException) {
        throw IOException("no channel to ${line.address}: ${error.message}", error)
    }
}

/** Returns a stub for one call. The time until the call's deadline begins now. */
internal fun <S : AbstractStub<S>> S.withDeadline(line: CommandLine): S =
    line.timeout?.let { withDeadlineAfter(it.inWholeNanoseconds, TimeUnit.NANOSECONDS) } ?: this

/** Java and gRPC each cache the addresses of a name for 30 s. During this time, a new server would not be found. */
private fun forgetNamesSoon() {
    Security.setProperty("networkaddress.cache.ttl", "1")
    System.setProperty("networkaddress.cache.ttl", "1")
}

/** Returns the settings for balancing, health checks and retries from the package of the stubs. */
private fun serviceConfig(): Map<String, *> {
    val json = InferenceServiceGrpc::class.java.getResource("/io/penstock/service_config.json")!!.readText()
    return Gson().fromJson(json, object : TypeToken<Map<String, *>>() {})
}

private fun credentials(line: CommandLine): ChannelCredentials {
    val ca = line.ca
    return when {
        ca != null -> TlsChannelCredentials.newBuilder().trustManager(File(ca)).build()
        line.tls -> TlsChannelCredentials.create()
        else -> InsecureChannelCredentials.create()
    }
}

/** Returns the metadata of each call, with the API key from the environment, if there is one. */
private fun authorization() = Metadata().apply {
    val key = System.getenv("PENSTOCK_API_KEY").orEmpty()
    if (key.isNotEmpty()) {
        put(Metadata.Key.of("authorization", Metadata.ASCII_STRING_MARSHALLER), "Bearer $key")
    }
}
